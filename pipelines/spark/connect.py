"""What a session of Spark Connect does in another way: it has no SparkContext, so no RDDs and no broadcast variables.

Preparation, evaluation and scoring need no more than this. Barrier stages cannot run there.
"""

import hashlib
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import cloudpickle
import pyarrow as pa
from pyspark import SparkFiles
from pyspark.sql import SparkSession

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")


class SentFile(Protocol):
    """Bytes that every executor has got once: a broadcast variable of Spark, or a file of Spark Connect."""

    @property
    def value(self) -> bytes:
        """The bytes."""

    def destroy(self) -> None:
        """Remove them from the executors."""


def is_connect(spark: object) -> bool:
    """Tell whether a session is one of Spark Connect."""
    # By name: importing Spark Connect needs gRPC, which a classic session does not.
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__)


def send(spark: SparkSession, content: bytes) -> SentFile:
    """Send bytes to every executor that asks for them, once."""
    if not is_connect(spark):
        sent: SentFile = spark.sparkContext.broadcast(content)
        return sent
    name = f"groundswell-{hashlib.sha256(content).hexdigest()}"
    with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        spark.addArtifacts(str(path), file=True)
    return _Artifact(name)


@dataclass(frozen=True)
class _Artifact:
    """A file of a session of Spark Connect, which ends with the session."""

    name: str

    @property
    def value(self) -> bytes:
        return Path(SparkFiles.get(self.name)).read_bytes()

    def destroy(self) -> None:
        """Do nothing: a session's files stay as long as the session."""


def call_each(spark: SparkSession, items: Sequence[_Item], function: Callable[[_Item], _Value]) -> list[_Value]:
    """Call a function for every item, on a session of Spark Connect, each in a partition of its own."""
    sent = [(number, cloudpickle.dumps(item)) for number, item in enumerate(items)]
    frame = spark.createDataFrame(sent, "number long, item binary").repartitionByRange(len(items), "number")

    def call(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number, item in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                value = cloudpickle.dumps(function(pickle.loads(item)))
                yield pa.RecordBatch.from_pydict({"number": [number], "value": [value]})

    rows: list[Any] = frame.mapInArrow(call, "number long, value binary").collect()
    values = {row["number"]: row["value"] for row in rows}
    return [pickle.loads(values[number]) for number in range(len(items))]
