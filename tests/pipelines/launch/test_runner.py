"""Real barrier stages with real worker processes; most start no TensorFlow, which would cost ten seconds each."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines.launch.runner import Attempt, BarrierRunner, WorkerError

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

    assert BarrierRunner(spark, 2, log_to_driver="none").run_all(function) == [[2.0, 3.0], [2.0, 3.0]]


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

    with pytest.raises(WorkerError, match=r"rank 1 on .* failed: killed by SIGKILL") as caught:
        BarrierRunner(spark, 2, log_to_driver="none").run(function)
    assert caught.value.root.last_lines == ("about to go",)


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
        BarrierRunner(spark, 2, log_to_driver="none").run(function)
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

    with pytest.raises(WorkerError, match=r"rank 1 on .* failed: exited with code 7") as caught:
        BarrierRunner(spark, 2, log_to_driver="none").run(function)
    assert caught.value.outcomes[0].kind == "consequence"


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


def test_an_exit_after_the_function_has_returned_is_a_failure(spark: SparkSession) -> None:
    def function() -> None:
        import atexit

        if os.environ["HOROVOD_RANK"] == "1":
            atexit.register(os._exit, 3)

    with pytest.raises(WorkerError, match=r"rank 1 on .* failed: exited with code 3 after the function had returned"):
        BarrierRunner(spark, 2).run(function)


@pytest.mark.parametrize(("choice", "shown"), [("all", {0, 1}), ("rank0", {0}), ("callback", set()), ("none", set())])
def test_the_choice_of_what_is_shown(spark: SparkSession, tmp_path: Path, choice: str, shown: set[int]) -> None:
    seen: list[tuple[int, str]] = []

    def function() -> None:
        from pipelines.launch.report import log_to_driver

        print("printed")
        log_to_driver("told")

    runner = BarrierRunner(
        spark,
        2,
        log_to_driver=choice,  # type: ignore[arg-type]
        log_folder=tmp_path / "logs",
        on_log=lambda rank, line: seen.append((rank, line)),
    )
    runner.run(function)
    assert {rank for rank, line in seen if line == "printed"} == shown
    assert {rank for rank, line in seen if line == "told"} == (set() if choice == "none" else {0, 1})
    for rank in (0, 1):
        assert set((tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()) == {"printed", "told"}


def test_the_whole_log_is_saved_however_long(spark: SparkSession, tmp_path: Path) -> None:
    shown: list[str] = []

    def function() -> None:
        for number in range(100_000):
            print(f"line {number}")

    runner = BarrierRunner(spark, 1, log_folder=tmp_path, on_log=lambda rank, line: shown.append(line))
    runner.run(function)
    assert (tmp_path / "rank-0.log").read_text() == "".join(f"line {number}\n" for number in range(100_000))
    assert len(shown) < 50_000
    assert "lines not shown" in shown[-1]


def test_infrastructure_is_tried_again(spark: SparkSession, tmp_path: Path) -> None:
    attempts: list[Attempt] = []

    def function() -> tuple[int, int]:
        import signal

        from pipelines.launch.report import attempt

        print("attempt", attempt())
        if attempt() < 3 and os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        while attempt() < 3:
            time.sleep(1)
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


def test_retries_come_to_an_end(spark: SparkSession) -> None:
    attempts: list[Attempt] = []
    with pytest.raises(WorkerError, match="exited with code 9"):
        BarrierRunner(spark, 1, retries=1, retry_wait=0.1, on_attempt=attempts.append).run(os._exit, 9)
    assert len(attempts) == 2


def test_the_users_exception_is_not_tried_again(spark: SparkSession) -> None:
    attempts: list[Attempt] = []

    def function() -> None:
        raise ValueError("a mistake stays one")

    with pytest.raises(WorkerError, match="a mistake stays one"):
        BarrierRunner(spark, 2, retries=5, retry_wait=0.1, on_attempt=attempts.append).run(function)
    assert len(attempts) == 1


def test_with_fewer_slots_the_largest_allowed_number_goes_on(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are counted by a stand-in: `tests/cluster` loses real ones."""
    attempts: list[Attempt] = []
    monkeypatch.setattr("pipelines.launch.runner.count_slots", lambda spark, wanted: 1)

    def function() -> str:
        from pipelines.launch.report import attempt

        if attempt() == 1:
            os._exit(1)
        return os.environ["HOROVOD_SIZE"]

    def runner(sizes: list[int]) -> BarrierRunner:
        return BarrierRunner(
            spark, 2, retries=1, retry_wait=0.1, allowed_sizes=sizes, on_attempt=attempts.append, log_to_driver="none"
        )

    assert runner([1, 2, 4]).run(function) == "1"
    assert [attempt.num_workers for attempt in attempts] == [2, 1]
    with pytest.raises(WorkerError):
        runner([]).run(function)


@pytest.mark.parametrize("fails", [False, True])
def test_training_goes_on_when_the_channel_dies(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    from pipelines.launch.channel import DriverChannel

    channels: list[DriverChannel] = []
    accept = DriverChannel._accept
    monkeypatch.setattr(DriverChannel, "_accept", lambda self: (channels.append(self), accept(self)))

    def function() -> int:
        from pipelines.launch.report import report

        report(begun=True)
        time.sleep(1.5)
        print("nobody hears this")
        if fails and os.environ["HOROVOD_RANK"] == "1":
            raise LookupError("not heard either")
        return int(os.environ["HOROVOD_RANK"])

    runner = BarrierRunner(spark, 2, log_to_driver="none", on_report=lambda message: channels[0].close())
    if fails:
        with pytest.raises(WorkerError, match="rank 1 failed: exited with code 1"):
            runner.run_all(function)
    else:
        assert runner.run_all(function) == [0, 1]


def test_ranks_that_never_start_are_named(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.launch.channel.DriverChannel._accept", lambda self: None)
    with pytest.raises(
        RuntimeError, match=r"2 of 2 tasks have not reached the driver at 127\.0\.0\.1:\d+ after start_timeout=2"
    ):
        BarrierRunner(spark, 2, start_timeout=2).run(print)


def test_neither_arguments_nor_logs_nor_the_environment_hold_the_secret(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.launch import channel

    secret = b"0123456789abcdefghijklmnopqrstuv"
    monkeypatch.setattr(channel.secrets, "token_bytes", lambda size: secret)

    def function() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found.append(path.read_bytes().decode(errors="replace"))
            except OSError:
                continue
        return [*found, *os.environ.values()]

    seen = BarrierRunner(spark, 2, log_folder=tmp_path).run(function)
    assert any("pipelines.launch.worker" in text for text in seen)
    logs = "".join(path.read_text() for path in tmp_path.iterdir()) if any(tmp_path.iterdir()) else ""
    for form in (secret.decode(), secret.hex()):
        assert form not in "".join(seen) + logs


@pytest.mark.parametrize("setting", ["spark.ssl.enabled", "spark.authenticate"])
def test_encryption_that_does_not_reach_the_ranks_must_be_accepted(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    asked = spark.sparkContext.getConf().set(setting, "true")
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: asked)
    with pytest.raises(RuntimeError, match=rf"{setting}=true covers .* does not cover .*accept_unencrypted=True"):
        BarrierRunner(spark, 1).run(len, "")
    assert BarrierRunner(spark, 1, accept_unencrypted=True).run(len, "abc") == 3


def test_dynamic_allocation_is_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = spark.sparkContext.getConf().set("spark.dynamicAllocation.enabled", "true")
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: asked)
    with pytest.raises(RuntimeError, match=r"spark\.dynamicAllocation\.enabled=false"):
        BarrierRunner(spark, 1).run(len, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": 1, "log_to_driver": "some"}, "log_to_driver='some' is not one of all, rank0"),
        ({"num_workers": 1, "retries": -1}, "retries=-1"),
    ],
)
def test_values_out_of_range(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BarrierRunner(None, **arguments)  # type: ignore[arg-type]
