"""Ranks whose spare takes over, and attempts that grow again, with a job that meets through files: no TensorFlow."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from pyspark.sql import SparkSession

from pipelines.launch.driver.failure import RankLostError, WorkerError
from pipelines.launch.rank.membership import is_spare, join, shared_memory_files, wait_for_turn
from pipelines.launch.rank.report import StoppedOnRequest, attempt, report, step_done, stop_requested
from pipelines.launch.runner import Attempt, BarrierRunner
from tests.patience import alive, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no Spark and no pytest: they start faster


def job(folder: str, steps: int, fail: Callable[[int, int, int], None]) -> tuple[list[int], list[int], int]:
    """Take steps in which all ranks meet; a rank that finds another one dead joins again.

    Args:
        folder: Where the ranks meet.
        steps: Number of steps.
        fail: Called with rank, step and the number of processes of this rank so far, in each step before the meeting.

    Returns:
        The process ids of this rank, the steps that this process has taken, and the number of the attempt.
    """
    place, rank, size = Path(folder), int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    wait_for_turn()
    memory = shared_memory_files()
    kept = json.loads((os.pread(memory[0], 1 << 16, 0) if memory else b"") or b'{"step": 0, "pids": []}')
    step, pids, taken = kept["step"], [*kept["pids"], os.getpid()], []

    def meet() -> None:
        """Raise ConnectionError where another rank has died."""
        port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        name = f"{port}-{step}"
        (place / f"{name}-{rank}").touch()
        while True:
            # Who is dead comes first: a rank that has met the others and died after that has left its file.
            dead = [other for other in range(size) if has_died(place / f"pid-{port}-{other}")]
            if all((place / f"{name}-{other}").exists() for other in range(size)):
                return
            if dead:
                raise ConnectionError("gloo/transport: Connection closed by peer")
            time.sleep(0.01)

    def has_died(file: Path) -> bool:
        """Whether the process that has joined in this round is dead; its spare joins in a later one."""
        return file.exists() and not alive(int(file.read_text()))

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


def killed_at(*places: tuple[int, int, int]) -> Callable[[int, int, int], None]:
    """A `fail` that kills at these ranks, steps and numbers of processes."""

    def fail(*place: int) -> None:
        if place in places:
            os.kill(os.getpid(), signal.SIGKILL)

    return fail


def run_with_spares(
    folder: Path, fail: Callable[[int, int, int], None], spark: SparkSession | None = None, steps: int = 6
) -> Any:
    return BarrierRunner(spark, 2, spares=True, log_to_driver="none").run_all(job, str(folder), steps, fail)


@pytest.mark.long
def test_spares_take_over_and_survivors_stay_and_all_may_die_at_once(spark: SparkSession, tmp_path: Path) -> None:
    fail = killed_at((1, 3, 1), (0, 5, 1), (1, 7, 2), (0, 9, 2), (1, 9, 3))
    (first_pids, first, attempt), (second_pids, second, _) = run_with_spares(tmp_path, fail, spark, steps=12)
    assert attempt == 1, "no new attempt"
    assert (len(first_pids), len(second_pids), len({*first_pids, *second_pids})) == (3, 4, 7)
    # Nobody takes a step twice: each process continues where the one before it stood.
    assert first == second == list(range(10, 13))
    assert not [pid for pid in (*first_pids, *second_pids) if psutil.pid_exists(pid)]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.parametrize(
    ("exits", "error", "message"),
    [
        (True, RankLostError, r"rank 1 on .* failed: exited with code 7"),
        (False, WorkerError, "LookupError: no such thing"),
    ],
)
def test_a_rank_that_dies_again_and_again_ends_the_attempt_and_an_exception_does_at_once(
    tmp_path: Path, exits: bool, error: type[Exception], message: str
) -> None:
    def fail(rank: int, step: int, processes: int) -> None:
        if (rank, step) == (1, 2):
            if exits:
                os._exit(7)
            raise LookupError("no such thing")

    with pytest.raises(error, match=message):
        run_with_spares(tmp_path, fail)


def ranks_processes() -> list[psutil.Process]:
    """The processes of this rank's task and of the other one, spares too."""
    children = psutil.Process(os.getppid()).children()
    return [each for each in children if "pipelines.launch.rank.rank_main" in each.cmdline()]


def test_a_spare_that_has_died_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    def fail(rank: int, step: int, processes: int) -> None:
        if (rank, step, processes) == (1, 3, 1):
            ranks = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
            wait_until(lambda: len(ranks_processes()) == 4)
            for each in ranks_processes():
                if each.pid not in ranks:
                    each.kill()
            os.kill(os.getpid(), signal.SIGKILL)

    pids, _, attempt = run_with_spares(tmp_path, fail)[1]
    assert (len(pids), attempt) == (2, 1)


def test_the_next_spare_starts_when_the_rank_goes_on(tmp_path: Path) -> None:
    """It would take the cores of the step for which all ranks wait."""
    death, before, after = (tmp_path / name for name in ("death", "before", "after"))

    def fail(rank: int, step: int, processes: int) -> None:
        def started_since_the_death() -> list[psutil.Process]:
            return [each for each in ranks_processes() if each.create_time() > float(death.read_text())]

        match rank, step, processes:
            case 1, 2, 1:
                wait_until(lambda: len(ranks_processes()) == 4)  # two ranks and their first spares
                time.sleep(0.1)  # clocks have ticks
                death.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            case 1, 2, 2:
                time.sleep(1.5)
                before.write_text(str(len(started_since_the_death())))
            case 1, 3, 2:
                wait_until(started_since_the_death)
                after.write_text(str(len(started_since_the_death())))

    (tmp_path / "job").mkdir()
    pids, _, attempt = run_with_spares(tmp_path / "job", fail)[1]
    assert (len(pids), attempt) == (2, 1)
    assert (before.read_text(), after.read_text()) == ("0", "1")


def test_without_spares_join_sets_the_time_of_one_operation_and_nothing_else(tmp_path: Path) -> None:
    def work() -> tuple[Any, ...]:
        before = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        wait_for_turn()
        join()
        other = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] != before
        return os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"], other, is_spare(), shared_memory_files()

    runner = BarrierRunner(None, 2, start_timeout=200, exchange_timeout=9, log_to_driver="none")
    assert runner.run_all(work) == [("9", True, False, ())] * 2


@pytest.mark.long
def test_a_smaller_attempt_grows_again_when_slots_are_back(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that go and come are the test's own: everything else is real."""
    slots = iter([1, 1, 2])  # after the failure; when the first epoch ends; when the second one ends
    monkeypatch.setattr("pipelines.launch.runner.count_slots", lambda *args: next(slots))
    attempts: list[Attempt] = []

    def function() -> int:
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
