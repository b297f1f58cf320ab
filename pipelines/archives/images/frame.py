"""Writes a Spark DataFrame as the Parquet files of a `table` archive."""

import functools
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema

from pipelines.archives.images.kept import refuse_repeated
from pipelines.archives.images.parquet_files import INCOMPLETE
from pipelines.spark.columns import map_columns, select_columns
from pipelines.spark.jobs import known_error, reason_of
from pipelines.storage.folder import Location

_ROWS_OF_A_GROUP = 64  # reading one image decodes its whole row group


def write_frame(
    frame: DataFrame,
    root: Location,
    columns: Sequence[str],
    check: Callable[[pa.Schema], object] = lambda schema: None,
    key: str | None = None,
) -> int:
    """Write columns of a DataFrame, one file per partition, and return the number of rows.

    Tasks write the files with pyarrow, so Spark need not know the storage. Until all files exist, the folder is marked
    as incomplete, and an archive in it is refused.

    Args:
        frame: DataFrame of any session, including Spark Connect.
        root: New or empty folder that all executors can access.
        columns: Names of the columns.
        check: Function that raises if the types do not fit; called before anything is written.
        key: Column whose values must all be different; a Spark job checks it before anything is written.

    Raises:
        ValueError: The folder has content, or an interrupted call wrote into it; or the DataFrame lacks one of the
            columns, has it twice, or has no rows. Or a key is null, or is in several rows.
        RuntimeError: The executors' Python cannot run the tasks.
    """
    check(to_arrow_schema(select_columns(frame, columns).schema))
    names = root.names()
    if INCOMPLETE in names:
        raise ValueError(
            f"archive.root={root}: a DataFrame was not written into it to its end: remove the folder, or name another "
            "one"
        )
    if names:
        raise ValueError(
            f"archive.root={root} is not empty, and a DataFrame is written into a new folder: name another one, or "
            "continue with the files that are there by `prepare` without `table`"
        )
    if key is not None:
        counts = select_columns(frame, [key]).toDF("key").groupBy("key").count()
        repeated = counts.where("key is null or count > 1").orderBy("count", ascending=False)
        refuse_repeated("the DataFrame", key, [(row[0], row[1]) for row in repeated.take(1)])
    root.make()
    root.write(INCOMPLETE, b"")
    parts = map_columns(frame, columns, functools.partial(_write_part, root=root), "rows long")
    try:
        rows = sum(int(row.rows) for row in parts.collect())
    except Exception as error:  # classic and Connect sessions have errors of their own
        if (known := known_error(reason_of(error), frame.sparkSession)) is not None:
            raise known from None
        raise
    root.remove(INCOMPLETE)
    if rows == 0:
        raise ValueError("the DataFrame has no rows")
    return rows


def _write_part(batches: Iterator[pa.RecordBatch], root: Location) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition, if it has any; a retried task writes the same file again."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return
    context = TaskContext.get()
    assert context is not None, "a task runs this"
    rows = first.num_rows
    with (
        root.new_file(f"part-{context.partitionId():05}.parquet") as path,
        pq.ParquetWriter(path, first.schema) as writer,
    ):
        writer.write_batch(first, row_group_size=_ROWS_OF_A_GROUP)
        for batch in filled:
            writer.write_batch(batch, row_group_size=_ROWS_OF_A_GROUP)
            rows += batch.num_rows
    yield pa.RecordBatch.from_pydict({"rows": pa.array([rows], pa.int64())})
