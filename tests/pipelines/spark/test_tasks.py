"""What the errors of Spark tasks are told as."""

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from pipelines.archives.images.frame import write_frame
from pipelines.launch.runner import BarrierRunner
from pipelines.spark import jobs, tasks
from pipelines.spark.jobs import JobCancelledError
from pipelines.storage.folder import Location
from tests.patience import alive, patient, wait_until

SPARK: Any = SimpleNamespace(sparkContext=SimpleNamespace(pythonExec="py"))


@pytest.fixture
def jvm_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the JVM of the fake session accept connections."""
    monkeypatch.setattr(tasks, "is_jvm_gone", lambda spark: False)


@pytest.mark.usefixtures("jvm_lives")
@pytest.mark.parametrize(
    ("folder", "error", "message"),
    [
        (
            "/data",
            OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
            "Spark's driver in /tmp/x ",
        ),
        ("/data", OSError(errno.EDQUOT, "Disk quota exceeded"), "Spark's driver in its temporary folder .spark.local"),
        ("/data", RuntimeError("x\nOSError: [Errno 28] No space left on device"), "the disk of /data: make room"),
        ("memory://data", RuntimeError("OSError: [Errno 28] No space"), r"an executor's disk \(TMPDIR\): make room"),
        ("/data", ConnectionResetError("gone"), "Spark's JVM has died"),
    ],
)
def test_a_full_disk_is_told_as_one(folder: str, error: Exception, message: str) -> None:
    found = tasks._explained(error, SPARK, Location.at(folder), ["a"], "", "finished shards are kept")
    assert "finished shards are kept" in str(found)
    with pytest.raises(RuntimeError, match=message):
        raise found


def in_tasks(spark: SparkSession, function: Callable[[int], Any], say: Callable[[str], None] = print) -> Any:
    folder = Location.at("/d")
    options: Any = {"finished": lambda files: {}, "say": say, "job": "score", "folder": folder, "less_memory": "less"}
    return tasks.run_until_done(spark, {"a": 1}, function, **options)["a"]


def on_ranks(spark: SparkSession, function: Callable[[int], Any]) -> Any:
    return BarrierRunner(spark, 2, retries=5).run(function, 1)


def from_frame(spark: SparkSession, _: object) -> int:
    return write_frame(spark.range(1), Location.at(f"memory://{uuid4()}"), ["id"])


@pytest.mark.spark
@pytest.mark.parametrize(
    ("work", "by", "end"),
    [
        (on_ranks, "Group", "group mine)"),
        (in_tasks, "Group", "group mine); finished shards are kept in /d, and the same command continues"),
        (on_ranks, "sWithTag", "tags mine)"),
    ],
)
def test_work_ends_where_the_callers_jobs_are_cancelled(
    spark: SparkSession, tmp_path: Path, work: Callable[..., Any], by: str, end: str
) -> None:
    """As a notebook's stop button does, with the group of its cell."""
    context, errors = spark.sparkContext, []

    def wait(_: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(patient(300))

    def cell() -> None:
        context.setJobGroup("mine", "my cell")
        context.addJobTag("mine")
        with pytest.raises(JobCancelledError) as caught:
            work(spark, wait)
        errors.append(str(caught.value))

    thread = InheritableThread(target=cell, daemon=True)
    thread.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == (2 if work is on_ranks else 1))
    (job,) = context.statusTracker().getActiveJobsIds()
    assert context._jsc.sc().statusStore().job(job).description().get() == "my cell"
    getattr(context, f"cancelJob{by}")("mine")
    thread.join(patient(60))
    assert errors == [f"the Spark job was cancelled from outside (part of cancelled job {end}"]
    wait_until(lambda: not any(alive(int(path.name)) for path in tmp_path.iterdir()))


LOST = "Job aborted due to stage failure: Lost task 0.0 in stage 1.0 (TID 1) (10.0.0.1 executor driver): "
IN_PYTHON = "\n\tat java.base/java.X(X.java:1)\n\tat org.apache.spark.api.python.Y(Y.scala:2)"
NO_START = (
    f"{LOST}org.apache.spark.SparkException: \nError from python worker:\n  Traceback:\n  Boom: no\nPYTHONPATH was:\n"
    "  /a.zip\norg.apache.spark.SparkException: EOFException occurred while reading the port number from x's stdout."
)


@pytest.mark.usefixtures("jvm_lives")
@pytest.mark.parametrize(
    ("reason", "kind", "words"),
    [
        *(
            (f"{LOST}{text}", tasks.LostWorkerError, r"a Python worker on 10.0.0.1 \(.*\) died at the shard a, ")
            for text in (
                "Python worker exited unexpectedly (crashed): Fatal Python error: Segmentation fault",
                "Python worker process terminated due to idle timeout (timeout: 60 seconds)",
                "Python worker failed to connect back.",
                "Timed out while waiting for the Python worker to connect back",
                "Python daemon failed to launch worker with code -1",
                "EOFException occurred while reading the port number from pyspark.daemon's stdout",
                f"java.io.EOFException{IN_PYTHON}",
                f"java.io.IOException: Broken pipe{IN_PYTHON}",
                f"java.net.SocketException: Connection reset{IN_PYTHON}",
            )
        ),
        (f"{LOST}java.io.EOFException\n\tat org.apache.hadoop.X(X.java:1)", RuntimeError, "Spark gave up: "),
        (NO_START, RuntimeError, r"Python is py, which .*, sends \(Boom: no\): set PYSPARK_PYTHON to .*; again$"),
        (
            "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in "
            "driver: 3.11, PySpark cannot run with different minor versions.",
            RuntimeError,
            r"the executors' Python is py, .* \(Python in worker .*: 3.10 than .* driver: 3.11\): set PYSPARK_",
        ),
    ],
)
def test_a_lost_python_is_tried_again_and_another_one_is_named(reason: str, kind: type, words: str) -> None:
    error = tasks._explained(RuntimeError(reason), SPARK, Location.at("/d"), ["a"], "less", "again")
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


@pytest.mark.spark
def test_a_local_session_uses_the_drivers_python_and_survives_the_death_of_its_daemon(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, dead, said = tmp_path / "python", tmp_path / "dead", []
    dying.write_text(f'#!/bin/sh\n[ -e {dead} ] || {{ touch {dead}; kill -9 $$; }}\nexec {sys.executable} "$@"\n')
    dying.chmod(0o700)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nothing/python3")
    monkeypatch.setattr(sys, "executable", str(dying))
    assert in_tasks(spark, lambda number: number + 1, said.append) == 2
    (line,) = said
    assert line.startswith("a Python worker died, ")
    assert line.endswith("what is not finished is tried again, attempt 2 of 4")
    assert on_ranks(spark, str) == "1"
    assert spark.sparkContext.pythonExec == "/nothing/python3"


@pytest.mark.spark
@pytest.mark.parametrize(
    ("script", "problem"),
    [(None, "Cannot run program .*"), ('exec {0} -S "$@"', "ModuleNotFoundError: No module named '.*'")],
)
def test_another_python_of_executors_is_named_with_the_drivers(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, problem: str
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script.format(sys.executable)}\n")
        python.chmod(0o700)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    monkeypatch.setattr(jobs, "is_local_mode", lambda spark: False)
    line = rf"^the executors' Python is \S+.*, {sys.executable} \(Python 3.*\), sends \({problem}\): set PYSPARK_PYTHON"
    for work in (in_tasks, on_ranks, from_frame):
        with pytest.raises(RuntimeError, match=line):
            work(spark, str)
