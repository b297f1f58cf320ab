"""Ranks that fail in real barrier stages, and what comes after; `test_failure_matrix` has every kind and moment."""

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from pyspark.sql import SparkSession

from jobs.shell.session import spark_session
from pipelines.launch import runner
from pipelines.launch.driver.failure import InfrastructureError, RankLostError, SparkGoneError, StartError
from pipelines.launch.rank import task
from pipelines.launch.rank.report import attempt, report, signs_of_life, step_done
from pipelines.launch.runner import Attempt, BarrierRunner, WorkerError
from pipelines.launch.wire.channel import DriverChannel
from pipelines.launch.wire.messages import JsonObject
from pipelines.spark.connect import send
from pipelines.spark.tasks import run_tasks
from pipelines.storage.folder import Location
from pipelines.tracking.store.runs import end_run, start_run
from pipelines.tracking.store.store import runs_client
from tests.patience import alive, patient, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(120)]
TOO_LONG = patient(300)
"""More seconds than a test may take."""


def test_a_failed_run_counts_as_failed_and_its_tasks_end_by_themselves(spark: SparkSession, tmp_path: Path) -> None:
    """Spark waits two seconds before it kills a Python worker, and the user's next job waits for the slots."""

    def function() -> None:
        (tmp_path / os.environ["HOROVOD_RANK"]).write_text(str(os.getppid()))
        report()
        raise ValueError("a mistake stays one")

    attempts, tracker = [], spark.sparkContext.statusTracker()
    jobs: set[int] = set()
    with pytest.raises(WorkerError, match="a mistake stays one"):
        BarrierRunner(
            spark,
            2,
            retries=5,
            retry_wait=0.1,
            on_attempt=attempts.append,
            on_report=lambda _: jobs.update(tracker.getActiveJobsIds()),
        ).run(function)
    assert len(attempts) == 1, "it is tried again"
    assert BarrierRunner(spark, 2).run(len, "ab") == 2  # its stage needs both slots
    assert [alive(int(path.read_text())) for path in tmp_path.iterdir()] == [True, True]
    assert [info.status for info in map(tracker.getJobInfo, jobs) if info] == ["FAILED"]


def test_a_rank_that_is_killed_is_named_with_its_last_lines_and_its_child_does_not_hold_up_the_error(
    spark: SparkSession,
) -> None:
    def function() -> None:
        print("about to go")
        if os.environ["HOROVOD_RANK"] == "1":
            if os.fork() == 0:  # as a data loader would
                time.sleep(TOO_LONG)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(TOO_LONG)

    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: killed by SIGKILL") as caught:
        BarrierRunner(spark, 2, log_to_driver="none").run(function)
    assert caught.value.root.last_lines == ("about to go",)


def test_an_exit_after_the_function_has_returned_is_a_failure(spark: SparkSession) -> None:
    def function() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            atexit.register(os._exit, 3)

    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: exited with code 3 after the function had returned"):
        BarrierRunner(spark, 2).run(function)


@pytest.mark.long
def test_a_ring_sums_and_its_survivors_are_consequences(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the survivor is.
    monkeypatch.setattr("pipelines.launch.driver.supervisor.CONSEQUENCES_SECONDS", patient(60))
    reports: list[dict[str, object]] = []

    def function() -> None:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()
        total = hvd.allreduce(tf.constant([1.0, hvd.rank() + 1.0]), op=hvd.Sum, name="first")
        report(total=[float(value) for value in total.numpy()])
        hvd.allreduce(tf.constant([1.0]), name="second")
        if hvd.rank() == 1:
            os._exit(7)
        hvd.allreduce(tf.constant([1.0]), name="third")

    with pytest.raises(RankLostError, match=r"rank 1 on .* failed: exited with code 7") as caught:
        BarrierRunner(spark, 2, log_to_driver="none", on_report=reports.append).run(function)
    assert ([report["total"] for report in reports], caught.value.outcomes[0].kind) == ([[2.0, 3.0]] * 2, "consequence")


def test_the_rank_that_failed_is_named_with_its_traceback_and_no_worker_outlives_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    def function() -> None:
        child, rank = subprocess.Popen(["sleep", "300"]), os.environ["HOROVOD_RANK"]
        (tmp_path / rank).write_text(f"{os.getpid()} {child.pid}")
        (tmp_path / rank).rename(tmp_path / f"{rank}.pids")
        wait_until(lambda: len(list(tmp_path.glob("*.pids"))) == 2)

        def deep_inside() -> None:
            raise LookupError("no such thing")

        if rank == "0":
            deep_inside()
        time.sleep(TOO_LONG)

    with pytest.raises(WorkerError, match=r"rank 0 on .* failed: LookupError: no such thing") as caught:
        BarrierRunner(spark, 2).run(function)
    assert "deep_inside" in str(caught.value)
    # Rank 1's own process goes as soon as its task does; its child belongs to a process group of that process.
    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == 4
    wait_until(lambda: not any(map(alive, pids)))


def test_an_interrupt_cancels_the_stage_and_reaches_the_caller(spark: SparkSession, tmp_path: Path) -> None:
    def function() -> None:
        (tmp_path / os.environ["HOROVOD_RANK"]).write_text(str(os.getpid()))
        time.sleep(patient(120))

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            BarrierRunner(spark, 2).run(function)
    finally:
        signal.signal(signal.SIGINT, previous)
    wait_until(lambda: not any(alive(int(path.read_text())) for path in tmp_path.iterdir()))
    assert BarrierRunner(spark, 2).run(len, "ab") == 2


@pytest.mark.long
def test_infrastructure_is_tried_again_after_a_wait_that_doubles(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[Attempt] = []

    def function() -> tuple[int, int]:
        print("attempt", attempt())
        if attempt() < 3 and os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        while attempt() < 3:
            time.sleep(0.1)
        return attempt(), int(os.environ["HOROVOD_RANK"])

    runner = BarrierRunner(
        spark, 2, retries=2, retry_wait=0.1, on_attempt=attempts.append, log_folder=tmp_path, log_to_driver="none"
    )
    assert (runner.run_all(function), [(attempt.number, attempt.num_workers) for attempt in attempts]) == (
        [(3, 0), (3, 1)],
        [(1, 2), (2, 2), (3, 2)],
    )
    assert attempts[0].after == ""
    assert "killed by SIGKILL" in attempts[1].after
    lines = (tmp_path / "rank-1.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("attempt")] == ["attempt 1", "attempt 2", "attempt 3"]
    assert any(line.startswith("--- attempt 2, after: rank 1 on ") for line in lines)
    waits = [record.message.rpartition("; ")[2] for record in caplog.records if record.message.startswith("attempt ")]
    assert waits == ["the next one in 0.1 s", "the next one in 0.2 s"]


def test_retries_come_to_an_end() -> None:
    attempts: list[Attempt] = []
    with pytest.raises(InfrastructureError, match="exited with code 9"):
        BarrierRunner(None, 1, retries=1, retry_wait=0.1, on_attempt=attempts.append).run(os._exit, 9)
    assert len(attempts) == 2


@pytest.mark.parametrize(
    ("slots", "allowed", "size", "last"),
    [
        ([1, 4], (), 4, "1 slot left, and 4 needed: waiting up to 77 s for new executors"),
        ([1, 3], (), None, "3 slots left, and 4 needed: there is no further attempt"),
        ([1, 2], (2,), 2, "left: 2 slots; the run continues with 2 workers"),
        ([2], (2,), 2, "left: 2 slots; the run continues with 2 workers"),
    ],
)
def test_the_next_attempt_waits_for_new_executors_as_long_as_ranks_may_take_to_start(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    slots: list[int],
    allowed: tuple[int, ...],
    size: int | None,
    last: str,
) -> None:
    asked = []

    def count(spark: object, wanted: int, seconds: float = 30.0) -> int:
        asked.append((wanted, seconds))
        return slots[len(asked) - 1]

    monkeypatch.setattr(runner, "drop_lost_executors", lambda spark, unreachable_hosts: None)
    monkeypatch.setattr(runner, "count_slots", count)
    job = BarrierRunner(object(), 4, retries=5, retry_wait=0, start_timeout=77, allowed_sizes=allowed)
    lost = InfrastructureError("an executor was lost")
    if size is None:
        with pytest.raises(InfrastructureError, match="an executor was lost"):
            job._next(Attempt(1, 4), lost)
    else:
        assert job._next(Attempt(1, 4), lost).num_workers == size
    assert (asked, caplog.messages[-1]) == ([(4, 30.0), (min([*allowed, 4]), 77)][: len(slots)], last)


def test_an_exception_is_told_though_a_thread_keeps_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python waits for such threads before Horovod hears of the end, and the other ranks wait in Horovod."""

    def function() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            threading.Thread(target=threading.Event().wait).start()
            raise ValueError("with a thread that waits for ever")
        time.sleep(TOO_LONG)

    monkeypatch.setattr(task, "FAILED_SECONDS", 1.0)
    with pytest.raises(WorkerError, match=r"rank 1 on .* failed: ValueError: with a thread that waits for ever"):
        BarrierRunner(None, 2).run(function)


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_training_goes_on_when_the_channel_dies(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    channels: list[DriverChannel] = []

    def recorded(host: str, bind: str) -> DriverChannel:
        channels.append(DriverChannel(host, bind))
        return channels[-1]

    monkeypatch.setattr(runner, "DriverChannel", recorded)
    monkeypatch.setattr("pipelines.launch.driver.supervisor.LAST_REPORTS_SECONDS", 1.0)  # none arrives

    def function() -> int:
        report(begun=True)
        wait_until((tmp_path / "closed").exists)
        print("nobody hears this")
        if fails and os.environ["HOROVOD_RANK"] == "1":
            raise LookupError("not heard either")
        return int(os.environ["HOROVOD_RANK"])

    def close(report: JsonObject) -> None:
        channels[0].close()
        (tmp_path / "closed").touch()

    job = BarrierRunner(spark, 2, log_to_driver="none", on_report=close)
    if fails:
        with pytest.raises(InfrastructureError, match="rank 1 failed: exited with code 1"):
            job.run_all(function)
    else:
        assert job.run_all(function) == [0, 1]


def test_a_process_that_cannot_be_started_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=OSError(12, "Cannot allocate memory"))
    monkeypatch.setattr("pipelines.launch.rank.processes.RankProcess", broken)
    words = r"2 of 2 tasks have not reached the driver: task [01]: OSError: \[Errno 12\] Cannot allocate memory"
    with pytest.raises(StartError, match=words):
        BarrierRunner(None, 2, start_timeout=3600).run(len, "")


@pytest.mark.long
def test_long_work_with_signs_of_life_is_no_hang() -> None:
    def function(seconds: float) -> str:
        step_done()
        with signs_of_life():
            time.sleep(seconds)
        time.sleep(TOO_LONG if seconds == 0 else 0)
        return "done"

    runner = BarrierRunner(None, 1, hang_timeout=patient(4), log_to_driver="none")
    assert runner.run(function, patient(6)) == "done"
    with pytest.raises(RankLostError, match=r"hung: no sign of life for \d+ s"):  # after such work as at any time
        runner.run(function, 0)


def lose_the_jvm() -> tuple[list[str], int, str]:
    """Kill Spark's driver while ranks run, and use the session again: errors, number of attempts, the run's status."""

    def function() -> None:
        report()
        time.sleep(TOO_LONG)

    def kill(report: JsonObject) -> None:
        for process in psutil.Process().children(recursive=True):
            if process.name() == "java":
                process.kill()

    errors, attempts, run = [], [], start_run("jvm", None, {}, {})
    with suppress(Exception), spark_session("groundswell tests", "local[2]") as spark:  # it cannot be stopped
        runner = BarrierRunner(spark, 2, retries=2, retry_wait=0, on_report=kill, on_attempt=attempts.append)
        for _ in range(2):
            try:
                runner.run(function)
            except InfrastructureError as error:
                errors.append(str(error))
        end_run(run, "KILLED")  # MLflow would ask the session for an address
    return errors, len(attempts), runs_client(run.uri).get_run(run.run_id).info.status


@pytest.mark.long
@pytest.mark.usefixtures("mlflow_store")
def test_a_dead_jvm_is_one_clear_line_and_the_run_ends(in_fresh_process: Callable[..., Any]) -> None:
    errors, attempts, status = in_fresh_process(lose_the_jvm)
    assert errors == [str(SparkGoneError())] * 2
    assert "Spark's own process on the driver (its JVM) has ended" in errors[0]
    assert (attempts, status) == (1, "KILLED")


def use_a_session_that(stop: Callable[[SparkSession], object]) -> list[str]:
    """Stop a session while ranks run, and use it again in each way: the errors."""

    def function() -> None:
        report()
        time.sleep(TOO_LONG)

    errors = []
    with spark_session("groundswell tests", "local[2]") as spark:
        runner = BarrierRunner(spark, 2, retries=2, retry_wait=0, on_report=lambda _: stop(spark))
        shards: dict[str, Any] = {"job": "prepare", "folder": Location.at("/data"), "files": ["a"], "less_memory": ""}
        ranks, tasks = partial(runner.run, function), partial(run_tasks, spark, [1], abs, **shards)
        for use in (ranks, ranks, tasks, partial(send, spark, b"")):
            try:
                use()
            except RuntimeError as error:
                errors.append(str(error))
    return errors


def use_stopped_sessions() -> list[str]:
    """Use a session that its user has stopped, and one that Spark itself has stopped: the errors."""
    return use_a_session_that(SparkSession.stop) + use_a_session_that(lambda spark: spark.sparkContext._jsc.stop())


@pytest.mark.long
def test_a_stopped_session_is_one_clear_line(in_fresh_process: Callable[..., Any]) -> None:
    errors = in_fresh_process(use_stopped_sessions)
    assert errors == ["the Spark session has been stopped: make another one, and start the job again in it"] * 8


def fail_with_sparks_log(log: str) -> str:
    """A rank fails in a session that writes warnings and errors to a file: Spark's verdict on the job."""
    Path(log + ".properties").write_text(
        "rootLogger.level = warn\nrootLogger.appenderRef.file.ref = file\nappender.file.type = File\n"
        f"appender.file.name = file\nappender.file.fileName = {log}\n"
        "appender.file.layout.type = PatternLayout\nappender.file.layout.pattern = %p %c{1}: %m%n%ex\n"
    )
    options = f"-Dlog4j2.configurationFile=file:{log}.properties"
    builder = SparkSession.builder.master("local[2]").config("spark.driver.extraJavaOptions", options)

    def function() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            raise LookupError("no such thing")
        time.sleep(TOO_LONG)

    with builder.config("spark.ui.enabled", "false").getOrCreate() as spark:
        with suppress(WorkerError):
            BarrierRunner(spark, 2).run(function)
        store = spark.sparkContext._jsc.sc().statusStore()  # hears of the job's end a moment later
        while (status := str(store.jobsList(None).apply(0).status().toString())) == "RUNNING":
            time.sleep(0.1)
        return status


@pytest.mark.long
def test_sparks_own_trace_does_not_stand_beside_ours(in_fresh_process: Callable[..., Any], tmp_path: Path) -> None:
    assert in_fresh_process(fail_with_sparks_log, str(tmp_path / "log")) == "FAILED"
    log = (tmp_path / "log").read_text()
    assert "WARN" in log  # Spark does write there
    assert ("Traceback" in log, "LookupError" in log) == (False, False), log
