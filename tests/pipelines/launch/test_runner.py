"""Real barrier stages with real worker processes; most start no TensorFlow, which would cost ten seconds each."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines.launch.runner import BarrierRunner, WorkerError, describe

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(120)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_every_rank_runs_and_rank_zeros_value_comes_back(spark: SparkSession) -> None:
    def function(base: int, *, factor: int) -> tuple[int, str, str]:
        rank = int(os.environ["HOROVOD_RANK"])
        return base + factor * rank, os.environ["HOROVOD_SIZE"], os.environ["CUDA_VISIBLE_DEVICES"]

    runner = BarrierRunner(spark, 2)
    assert runner.run_all(function, 10, factor=5) == [(10, "2", "-1"), (15, "2", "-1")]
    assert runner.run(function, 1, factor=0) == (1, "2", "-1")


def test_lines_and_reports_reach_the_driver_with_their_rank(spark: SparkSession) -> None:
    lines: list[tuple[int, str]] = []
    reports: list[dict[str, object]] = []

    def function() -> None:
        import sys

        from pipelines.launch.report import report

        for number in range(20):
            print("line", number)
        print("to stderr", file=sys.stderr)
        report(progress=0.5)

    BarrierRunner(spark, 2, on_log=lambda rank, line: lines.append((rank, line)), on_report=reports.append).run(
        function
    )
    for rank in (0, 1):
        own = [line for sender, line in lines if sender == rank]
        assert [line for line in own if line.startswith("line")] == [f"line {number}" for number in range(20)]
        assert "to stderr" in own
    assert sorted(report["rank"] for report in reports) == [0, 1]  # type: ignore[type-var]


def test_a_horovod_ring_sums_over_the_ranks(spark: SparkSession) -> None:
    def function() -> list[float]:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()
        total = hvd.allreduce(tf.constant([1.0, hvd.rank() + 1.0]), op=hvd.Sum)
        return [float(value) for value in total.numpy()]

    assert BarrierRunner(spark, 2, on_log=lambda rank, line: None).run_all(function) == [[2.0, 3.0], [2.0, 3.0]]


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_that_failed_first_is_named_with_its_traceback(spark: SparkSession, culprit: int) -> None:
    def function() -> None:
        import time

        def deep_inside() -> None:
            raise LookupError("no such thing")

        if int(os.environ["HOROVOD_RANK"]) == culprit:
            deep_inside()
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank {culprit} on .* failed: LookupError: no such thing") as caught:
        BarrierRunner(spark, 2).run(function)
    assert "deep_inside" in str(caught.value)
    assert time.monotonic() - started < 30


def test_a_worker_that_dies_is_named_with_its_signal_and_last_lines(spark: SparkSession) -> None:
    def function() -> None:
        import signal
        import time

        print("about to go")
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(WorkerError, match=r"rank 1 on .* failed: killed by SIGKILL\nabout to go"):
        BarrierRunner(spark, 2, on_log=lambda rank, line: None).run(function)


def test_an_exit_code_is_named(spark: SparkSession) -> None:
    def function() -> None:
        os._exit(3)

    with pytest.raises(WorkerError, match="exited with code 3"):
        BarrierRunner(spark, 1).run(function)


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
                time.sleep(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 on .* failed: killed by SIGKILL"):
        BarrierRunner(spark, 2, on_log=lambda rank, line: None).run(function)
    assert time.monotonic() - started < 30


def test_a_talkative_rank_still_fails_with_its_own_error(spark: SparkSession) -> None:
    lines: list[str] = []

    def slow(rank: int, line: str) -> None:
        time.sleep(0.01)
        lines.append(line)

    def function() -> None:
        print("x" * (3 << 20))
        print(*range(300), sep="\r")
        raise LookupError("after all that")

    with pytest.raises(WorkerError, match="LookupError: after all that"):
        BarrierRunner(spark, 1, on_log=slow).run(function)
    assert "299" in lines
    assert max(map(len, lines)) <= 1 << 14


def test_the_survivors_of_a_ring_are_consequences(spark: SparkSession) -> None:
    def function() -> None:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()
        hvd.allreduce(tf.constant([1.0]), name="first")
        if hvd.rank() == 1:
            os._exit(7)
        hvd.allreduce(tf.constant([1.0]), name="second")

    with pytest.raises(WorkerError, match=r"rank 1 on .* failed: exited with code 7"):
        BarrierRunner(spark, 2, on_log=lambda rank, line: None).run(function)


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


def test_more_workers_than_slots_is_said_at_once(spark: SparkSession) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"3 workers do not fit 2 slots of local\[2\]"):
        BarrierRunner(spark, 3).run(print)
    assert time.monotonic() - started < 5


def test_gpus_that_spark_does_not_offer_are_said_at_once(spark: SparkSession) -> None:
    with pytest.raises(RuntimeError, match=r"spark\.task\.resource\.gpu\.amount"):
        BarrierRunner(spark, 1, gpus_per_worker=1).run(print)


def test_what_cannot_be_pickled_is_said_at_once(spark: SparkSession) -> None:
    import threading

    with pytest.raises(ValueError, match="cannot be sent to the workers"):
        BarrierRunner(spark, 1).run(print, threading.Lock())


def test_consequences_are_not_the_cause() -> None:
    consequence = {
        "rank": 0,
        "host": "a",
        "error": "UnknownError",
        "message": "Horovod has been shut down. This was caused by an exception on one of the ranks",
        "traceback": "t0",
        "last_lines": [],
    }
    cause = {"rank": 1, "host": "b", "error": "ValueError", "message": "boom", "traceback": "t1", "last_lines": []}
    assert describe([consequence, cause]) == (
        "rank 1 on b failed: ValueError: boom (ranks 0 stopped in consequence)\nt1"
    )
