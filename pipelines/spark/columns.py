"""Columns of DataFrames by their exact names, whatever characters these have."""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame

from pipelines.spark.jobs import for_executors, on_drivers_python


def quoted(name: str) -> str:
    """Return a column's name for SQL, where a dot would mean a field of a struct."""
    return f"`{name.replace('`', '``')}`"


def select_columns(frame: DataFrame, names: Sequence[str]) -> DataFrame:
    """Select columns of a frame of any session.

    Raises:
        ValueError: The frame has no such column, or several that Spark does not distinguish.
    """
    for name in names:
        if name not in frame.columns:
            raise ValueError(f"the DataFrame has no column {name!r}; its columns are {', '.join(frame.columns)}")
        alike = [column for column in frame.columns if column.lower() == name.lower()]
        if len(alike) > 1:
            raise ValueError(f"the DataFrame has the columns {', '.join(map(repr, alike))}: rename all but one")
    return frame.select(*map(quoted, names))


def map_columns(
    frame: DataFrame,
    names: Sequence[str],
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
) -> DataFrame:
    """Apply a function to columns of a frame, as `mapInArrow` does, which reads a dot in a name as a field of a struct.

    Raises:
        ValueError: `select_columns` fails.
    """

    def renamed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(pa.RecordBatch.from_arrays(batch.columns, list(names)) for batch in batches)

    numbered = select_columns(frame, names).toDF(*(f"column_{number}" for number in range(len(names))))
    with on_drivers_python(frame.sparkSession):
        return numbered.mapInArrow(for_executors(renamed), schema)
