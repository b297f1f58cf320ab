"""Ranks that fail in real barrier stages, and what comes after; `test_failure_matrix` has every kind and moment."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines.launch.failure import InfrastructureError, RankLostError
from pipelines.launch.runner import Attempt, BarrierRunner, WorkerError

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(120)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_that_failed_first_is_named_with_its_traceback(spark: SparkSession, culprit: int) -> None:
    def function() -> None:
        def deep_inside() -> None:
            raise LookupError("no such thing")

        if int(os.environ["HOROVOD_RANK"]) == culprit:
            deep_inside()
        time.sleep(300)  # longer than this test may take

    with pytest.raises(WorkerError, match=f"rank {culprit} on .* failed: LookupError: no such thing") as caught:
        BarrierRunner(spark, 2).run(function)
    assert "deep_inside" in str(caught.value)


def test_a_worker_that_dies_is_named_with_its_signal_and_last_lines(spark: SparkSession) -> None:
    def function() -> None:
        import signal
        import time

        print("about to go")
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: killed by SIGKILL") as caught:
        BarrierRunner(spark, 2, log_to_driver="none").run(function)
    assert caught.value.root.last_lines == ("about to go",)


def test_an_exit_after_the_function_has_returned_is_a_failure(spark: SparkSession) -> None:
    def function() -> None:
        import atexit

        if os.environ["HOROVOD_RANK"] == "1":
            atexit.register(os._exit, 3)

    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: exited with code 3 after the function had returned"):
        BarrierRunner(spark, 2).run(function)


def test_a_talkative_rank_still_fails_with_its_own_error(spark: SparkSession) -> None:
    lines: list[str] = []

    def slow(rank: int, line: str) -> None:
        time.sleep(0.002)
        lines.append(line)

    def function() -> None:
        print("x" * (3 << 20))
        print(*range(300), sep="\r")
        raise LookupError("after all that")

    with pytest.raises(WorkerError, match="LookupError: after all that"):
        BarrierRunner(spark, 1, on_log=slow).run(function)
    assert "299" in lines
    assert max(map(len, lines)) <= 1 << 14


def test_a_ring_sums_and_its_survivors_are_consequences(spark: SparkSession) -> None:
    reports: list[dict[str, object]] = []

    def function() -> None:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        from pipelines.launch.report import report

        hvd.init()
        total = hvd.allreduce(tf.constant([1.0, hvd.rank() + 1.0]), op=hvd.Sum, name="first")
        report(total=[float(value) for value in total.numpy()])
        hvd.allreduce(tf.constant([1.0]), name="second")
        if hvd.rank() == 1:
            time.sleep(0.5)  # for the report
            os._exit(7)
        hvd.allreduce(tf.constant([1.0]), name="third")

    runner = BarrierRunner(spark, 2, log_to_driver="none", on_report=reports.append)
    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: exited with code 7") as caught:
        runner.run(function)
    assert [report["total"] for report in reports] == [[2.0, 3.0]] * 2
    assert caught.value.outcomes[0].kind == "consequence"


def test_no_worker_outlives_a_failure(spark: SparkSession, tmp_path: Path) -> None:
    def function() -> None:
        import subprocess
        import time

        child = subprocess.Popen(["sleep", "300"])
        rank = os.environ["HOROVOD_RANK"]
        (tmp_path / f"{rank}.pids").write_text(f"{os.getpid()} {child.pid}")
        while len(list(tmp_path.glob("*.pids"))) < 2:
            time.sleep(0.05)
        if rank == "0":
            raise ValueError("enough")
        time.sleep(300)

    with pytest.raises(WorkerError, match="enough"):
        BarrierRunner(spark, 2).run(function)
    # Rank 1's own process goes as soon as its task does; its child belongs to a process group of that process.
    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 15
    while remaining := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {remaining}"
        time.sleep(0.1)


def test_a_child_that_outlives_its_rank_does_not_hold_up_the_error(spark: SparkSession) -> None:
    def function() -> None:
        import signal
        import time

        if os.environ["HOROVOD_RANK"] == "1":
            if os.fork() == 0:  # as a data loader would
                time.sleep(300)  # longer than this test may take
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)

    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: killed by SIGKILL"):
        BarrierRunner(spark, 2, log_to_driver="none").run(function)


def test_an_interrupt_cancels_the_stage_and_reaches_the_caller(spark: SparkSession, tmp_path: Path) -> None:
    def function() -> None:
        import time

        (tmp_path / os.environ["HOROVOD_RANK"]).write_text(str(os.getpid()))
        time.sleep(120)

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            BarrierRunner(spark, 2).run(function)
    finally:
        signal.signal(signal.SIGINT, previous)
    deadline = time.monotonic() + 15
    while any(alive(int(path.read_text())) for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert BarrierRunner(spark, 2).run(len, "ab") == 2


def test_infrastructure_is_tried_again_after_a_wait_that_doubles(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[Attempt] = []

    def function() -> tuple[int, int]:
        import signal

        from pipelines.launch.report import attempt

        print("attempt", attempt())
        if attempt() < 3 and os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        while attempt() < 3:
            time.sleep(0.1)
        return attempt(), int(os.environ["HOROVOD_RANK"])

    runner = BarrierRunner(
        spark, 2, retries=2, retry_wait=0.1, on_attempt=attempts.append, log_folder=tmp_path, log_to_driver="none"
    )
    assert runner.run_all(function) == [(3, 0), (3, 1)]
    assert [(attempt.number, attempt.num_workers) for attempt in attempts] == [(1, 2), (2, 2), (3, 2)]
    assert attempts[0].after == ""
    assert "killed by SIGKILL" in attempts[1].after
    lines = (tmp_path / "rank-1.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("attempt")] == ["attempt 1", "attempt 2", "attempt 3"]
    assert any(line.startswith("--- attempt 2, after: rank 1 on ") for line in lines)
    waits = [record.message.rpartition("; ")[2] for record in caplog.records if record.message.startswith("attempt ")]
    assert waits == ["the next one in 0.1 s", "the next one in 0.2 s"]


def test_retries_come_to_an_end(spark: SparkSession) -> None:
    attempts: list[Attempt] = []
    with pytest.raises(InfrastructureError, match="exited with code 9"):
        BarrierRunner(spark, 1, retries=1, retry_wait=0.1, on_attempt=attempts.append).run(os._exit, 9)
    assert len(attempts) == 2


def test_the_users_exception_is_not_tried_again(spark: SparkSession) -> None:
    attempts: list[Attempt] = []

    def function() -> None:
        raise ValueError("a mistake stays one")

    with pytest.raises(WorkerError, match="a mistake stays one"):
        BarrierRunner(spark, 2, retries=5, retry_wait=0.1, on_attempt=attempts.append).run(function)
    assert len(attempts) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_training_goes_on_when_the_channel_dies(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    from pipelines.launch.channel import DriverChannel

    channels: list[DriverChannel] = []
    accept = DriverChannel._accept

    def recorded(channel: DriverChannel) -> None:
        channels.append(channel)
        accept(channel)

    monkeypatch.setattr(DriverChannel, "_accept", recorded)

    def function() -> int:
        from pipelines.launch.report import report

        report(begun=True)
        time.sleep(0.5)
        print("nobody hears this")
        if fails and os.environ["HOROVOD_RANK"] == "1":
            raise LookupError("not heard either")
        return int(os.environ["HOROVOD_RANK"])

    runner = BarrierRunner(spark, 2, log_to_driver="none", on_report=lambda message: channels[0].close())
    if fails:
        with pytest.raises(InfrastructureError, match="rank 1 failed: exited with code 1"):
            runner.run_all(function)
    else:
        assert runner.run_all(function) == [0, 1]
