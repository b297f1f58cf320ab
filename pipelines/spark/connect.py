"""Special code for sessions of Spark Connect, which have no SparkContext, so no RDDs and no broadcast variables.

Preparation, evaluation and scoring need nothing else. Barrier stages cannot run there.
"""

import hashlib
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import cloudpickle
import pyarrow as pa
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from pipelines.spark.jobs import for_executors
from pipelines.spark.session import check_running, is_connect

Item = TypeVar("Item")
Value = TypeVar("Value")


class SentFile(Protocol):
    """Bytes that every executor receives once: a broadcast variable of Spark, or a file of Spark Connect."""

    @property
    def value(self) -> bytes:
        """The content."""

    def destroy(self) -> None:
        """Remove the bytes from the executors."""


def send(spark: SparkSession, content: bytes) -> SentFile:
    """Send bytes once to every executor that asks for them.

    Raises:
        RuntimeError: The session has been stopped.
    """
    check_running(spark)
    if not is_connect(spark):
        return spark.sparkContext.broadcast(content)
    name = f"groundswell-{hashlib.sha256(content).hexdigest()}"
    with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        spark.addArtifacts(str(path), file=True)
    return _Artifact(name)


@contextmanager
def sent(spark: SparkSession, content: bytes) -> Iterator[SentFile]:
    """Send bytes once to every executor that asks for them, and remove them when the block ends."""
    file = send(spark, content)
    try:
        yield file
    finally:
        with suppress(Exception):  # the JVM may have died; the block has reported that
            file.destroy()


@dataclass(frozen=True)
class _Artifact:
    """A file of a Spark Connect session, which is removed with the session."""

    name: str

    @property
    def value(self) -> bytes:
        return Path(SparkFiles.get(self.name)).read_bytes()

    def destroy(self) -> None:
        """Do nothing, because Spark Connect removes a session's files with the session."""


def call_each(spark: SparkSession, items: Sequence[Item], function: Callable[[Item], Value]) -> list[Value]:
    """Call a function for every item on a session of Spark Connect, each in its own partition."""
    pickled = [(number, cloudpickle.dumps(item)) for number, item in enumerate(items)]
    frame = spark.createDataFrame(pickled, "number long, item binary").repartitionByRange(len(items), "number")

    def call(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number, item in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                value = cloudpickle.dumps(function(pickle.loads(item)))
                yield pa.RecordBatch.from_pydict({"number": [number], "value": [value]})

    values = {
        row["number"]: row["value"]
        for row in frame.mapInArrow(for_executors(call), "number long, value binary").collect()
    }
    return [pickle.loads(values[number]) for number in range(len(items))]
