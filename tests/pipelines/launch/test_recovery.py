"""Ranks whose spare takes over, and attempts that grow again, with a job that meets through files: no TensorFlow."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from pipelines.launch.failure import RankLostError, WorkerError
from pipelines.launch.runner import Attempt, BarrierRunner
from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]


def job(
    folder: str, steps: int, fail: Callable[[int, int, int], None], *, rejoins: bool = True
) -> tuple[list[int], list[int], int]:
    """Take steps in which all ranks meet; a rank that finds another one dead joins again.

    Args:
        folder: Where the ranks meet.
        steps: Number of steps.
        fail: Called with rank, step and the number of processes of this rank so far, in each step before the meeting.
        rejoins: Whether survivors join again.

    Returns:
        The process ids of this rank, the steps that this process has taken, and the number of the attempt.
    """
    import json
    import os
    import time
    from pathlib import Path

    from pipelines.launch.membership import join, kept_memory, wait_for_turn
    from pipelines.launch.report import attempt, step_done

    place, rank, size = Path(folder), int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    wait_for_turn()
    memory = kept_memory()
    size_of_kept = os.fstat(memory[0]).st_size if memory else 0
    text = os.pread(memory[0], size_of_kept, 0) if size_of_kept else b'{"step": 0, "pids": []}'
    kept = json.loads(text)
    step, pids, taken = kept["step"], [*kept["pids"], os.getpid()], []

    def meet() -> None:
        """Raise ConnectionError where another rank has died."""
        port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        name = f"{port}-{step}"
        (place / f"{name}-{rank}").touch()
        while True:
            # Who is dead comes first: a rank that has met the others and died after that has left its file.
            dead = [other for other in range(size) if not is_alive(place / f"pid-{port}-{other}")]
            if all((place / f"{name}-{other}").exists() for other in range(size)):
                return
            if dead:
                raise ConnectionError("gloo/transport: Connection closed by peer")
            time.sleep(0.01)

    def is_alive(file: Path) -> bool:
        """Whether the process that has joined in this round lives; its spare joins in a later one."""
        if not file.exists():
            return True
        try:
            return ") Z " not in Path("/proc", file.read_text(), "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    def join_others() -> None:
        join(step)
        new = place / f"new-{rank}"
        new.write_text(str(os.getpid()))
        new.rename(place / f"pid-{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}-{rank}")

    join_others()
    while step < steps:
        fail(rank, step, len(pids))
        try:
            meet()
        except ConnectionError:
            if not rejoins:
                raise
            join_others()
            continue
        step += 1
        taken.append(step)
        step_done()
        if memory:
            data = json.dumps({"step": step, "pids": pids}).encode()
            os.ftruncate(memory[0], 0)
            os.pwrite(memory[0], data, 0)
    return pids, taken, attempt()


def test_spares_take_over_and_survivors_stay(spark: SparkSession, tmp_path: Path) -> None:
    def fail(rank: int, step: int, processes: int) -> None:
        if (rank, step, processes) in ((1, 3, 1), (0, 5, 1), (1, 7, 2)):
            os.kill(os.getpid(), signal.SIGKILL)

    lines: list[str] = []
    runner = BarrierRunner(spark, 2, spares=True, on_log=lambda rank, line: lines.append(line))
    (first_pids, first, attempt), (second_pids, second, _) = runner.run_all(job, str(tmp_path), 10, fail)
    assert attempt == 1, "no new attempt"
    assert (len(first_pids), len(second_pids)) == (2, 3)
    assert len({*first_pids, *second_pids}) == 5
    # Nobody takes a step twice: each process continues where the one before it stood.
    assert first[0] in (5, 6)
    assert first == list(range(first[0], 11))
    assert second == list(range(second[0], 11))
    left = [pid for pid in (*first_pids, *second_pids) if psutil.pid_exists(pid)]
    assert not left
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_both_ranks_may_die_at_once(tmp_path: Path) -> None:
    def fail(rank: int, step: int, processes: int) -> None:
        if step == 4 and processes == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    (first, _, _), (second, _, _) = BarrierRunner(None, 2, spares=True, log_to_driver="none").run_all(
        job, str(tmp_path), 6, fail
    )
    assert (len(first), len(second)) == (2, 2)


def test_a_rank_that_dies_again_and_again_ends_the_attempt(tmp_path: Path) -> None:
    def fail(rank: int, step: int, processes: int) -> None:
        if (rank, step) == (1, 2):
            os._exit(7)

    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: exited with code 7"):
        BarrierRunner(None, 2, spares=True, log_to_driver="none").run(job, str(tmp_path), 6, fail)


def test_an_exception_is_never_recovered(tmp_path: Path) -> None:
    def fail(rank: int, step: int, processes: int) -> None:
        if (rank, step) == (1, 2):
            raise LookupError("no such thing")

    with pytest.raises(WorkerError, match="LookupError: no such thing"):
        BarrierRunner(None, 2, spares=True, log_to_driver="none").run(job, str(tmp_path), 6, fail)


def test_where_survivors_do_not_join_again_the_dead_rank_is_the_cause(tmp_path: Path) -> None:
    def fail(rank: int, step: int, processes: int) -> None:
        if (rank, step, processes) == (1, 2, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: killed by SIGKILL"):
        BarrierRunner(None, 2, spares=True, log_to_driver="none").run(job, str(tmp_path), 6, fail, rejoins=False)


def test_a_rank_that_dies_when_another_has_finished_is_not_replaced(tmp_path: Path) -> None:
    def work(folder: str) -> None:
        from pipelines.launch.membership import join, wait_for_turn

        wait_for_turn()
        other = Path(folder, "pid")
        if os.environ["HOROVOD_RANK"] == "1":
            other.write_text(str(os.getpid()))
        join()
        if os.environ["HOROVOD_RANK"] == "0":
            stat = Path("/proc", other.read_text(), "stat")
            while stat.exists() and ") Z " not in stat.read_text():
                time.sleep(0.05)
            time.sleep(patient(0.5))  # its task has looked at how it ended
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankLostError, match=r"rank 0 on .* failed: killed by SIGKILL"):
        BarrierRunner(None, 2, spares=True, log_to_driver="none").run(work, str(tmp_path))


def test_a_spare_that_has_died_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    def fail(rank: int, step: int, processes: int) -> None:
        if (rank, step, processes) == (1, 3, 1):
            import psutil

            mine, ranks = psutil.Process(), [int(file.read_text()) for file in tmp_path.glob("pid-*")]
            deadline = time.monotonic() + patient(60)
            spares: list[psutil.Process] = []
            while len(spares) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
                children = [each for each in psutil.Process(mine.ppid()).children() if each.pid not in ranks]
                spares = [each for each in children if "pipelines.launch.rank_main" in each.cmdline()]
            for each in spares:
                each.kill()
            mine.kill()

    pids, _, attempt = BarrierRunner(None, 2, spares=True, log_to_driver="none").run_all(job, str(tmp_path), 6, fail)[1]
    assert (len(pids), attempt) == (2, 1)


def test_the_next_spare_starts_when_the_rank_goes_on(tmp_path: Path) -> None:
    """It would take the cores of the step for which all ranks wait."""

    def fail(rank: int, step: int, processes: int) -> None:
        import psutil

        if rank == 0:
            return
        mine, death = psutil.Process(), Path(tmp_path, "death")

        def started_after(moment: float) -> int:
            """Number of ranks' processes."""
            children = [each for each in psutil.Process(mine.ppid()).children() if each.create_time() > moment]
            return len([each for each in children if "pipelines.launch.rank_main" in each.cmdline()])

        def wait_for(count: int, moment: float) -> None:
            deadline = time.monotonic() + patient(60)
            while started_after(moment) < count and time.monotonic() < deadline:
                time.sleep(0.05)

        if (step, processes) == (2, 1):
            wait_for(4, 0)  # two ranks and their first spares
            time.sleep(0.1)  # clocks have ticks
            death.write_text(str(time.time()))
            mine.kill()
        if (step, processes) == (2, 2):
            time.sleep(1.5)
            Path(tmp_path, "before").write_text(str(started_after(float(death.read_text()))))
        if (step, processes) == (3, 2):
            wait_for(1, float(death.read_text()))
            Path(tmp_path, "after").write_text(str(started_after(float(death.read_text()))))

    (tmp_path / "job").mkdir()
    runner = BarrierRunner(None, 2, spares=True, log_to_driver="none")
    pids, _, attempt = runner.run_all(job, str(tmp_path / "job"), 6, fail)[1]
    assert (len(pids), attempt) == (2, 1)
    assert ((tmp_path / "before").read_text(), (tmp_path / "after").read_text()) == ("0", "1")


def test_without_spares_join_sets_the_time_of_one_operation_and_nothing_else(tmp_path: Path) -> None:
    def work() -> tuple[Any, ...]:
        from pipelines.launch.membership import is_spare, join, kept_memory, wait_for_turn

        before = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        wait_for_turn()
        join()
        other = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] != before
        return os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"], other, is_spare(), kept_memory()

    runner = BarrierRunner(None, 2, start_timeout=200, exchange_timeout=9, log_to_driver="none")
    assert runner.run_all(work) == [("9", True, False, ())] * 2


def test_a_smaller_attempt_grows_again_when_slots_are_back(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that go and come are the test's own: everything else is real."""
    slots = iter([1, 1, 2])  # after the failure; when the first epoch ends; when the second one ends
    monkeypatch.setattr("pipelines.launch.runner.count_slots", lambda *args: next(slots))
    attempts: list[Attempt] = []

    def function() -> int:
        import time

        from pipelines.launch.report import StoppedOnRequest, attempt, report, stop_requested

        if attempt() == 1 and os.environ["HOROVOD_RANK"] == "1":
            os._exit(7)
        if attempt() == 2:
            report(event="epoch")
            time.sleep(1)
            assert not stop_requested(), "there is one slot"
            report(event="epoch")
        while attempt() < 3:
            if stop_requested():
                raise StoppedOnRequest("saved")
            time.sleep(0.05)
        return attempt()

    runner = BarrierRunner(
        spark,
        2,
        retries=1,
        retry_wait=0,
        allowed_sizes=[1],
        log_to_driver="none",
        on_attempt=attempts.append,
        on_report=lambda message: runner.grow(),
    )
    assert runner.run(function) == 3
    assert [(each.number, each.num_workers) for each in attempts] == [(1, 2), (2, 1), (3, 2)]
    assert attempts[2].after == "slots for all 2 workers are back", "it is no retry, of which there was one"


def test_a_cycle_of_ones_own_is_refused_with_spares() -> None:
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME=5: where it is set and ranks join again"):
        BarrierRunner(None, 2, spares=True, env={"HOROVOD_CYCLE_TIME": "5"})
