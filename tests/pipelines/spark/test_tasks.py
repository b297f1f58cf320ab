"""What the errors of Spark tasks are told as."""

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.spark import tasks
from pipelines.storage.folder import Location

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
