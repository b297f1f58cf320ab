"""What the errors of Spark tasks are told as."""

import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from pipelines.spark import tasks
from pipelines.spark.jobs import JobCancelledError
from pipelines.storage.folder import Location
from tests.patience import patient, wait_until

SPARK: Any = SimpleNamespace(sparkContext=SimpleNamespace(_gateway=SimpleNamespace(proc=None)))


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


@pytest.mark.spark
def test_tasks_end_where_the_callers_job_group_is_cancelled(spark: SparkSession, tmp_path: Path) -> None:
    context, errors = spark.sparkContext, []

    def task(_: int) -> None:
        (tmp_path / "running").touch()
        time.sleep(patient(300))

    def cell() -> None:
        context.setJobGroup("mine", "my cell")
        with pytest.raises(JobCancelledError, match=r"cancelled job group mine\); finished shards"):
            tasks.run_until_done(
                spark, {"a": 1}, task, finished=dict, say=print, job="score", folder=Location.at("/d"), less_memory=""
            )
        errors.append("cancelled")

    thread = InheritableThread(target=cell, daemon=True)
    thread.start()
    wait_until((tmp_path / "running").exists)
    context.cancelJobGroup("mine")
    thread.join(patient(60))
    assert errors
