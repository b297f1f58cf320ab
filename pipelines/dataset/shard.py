"""One shard: planned on the driver, written by one Spark task, whole or not there."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.archives.archive import Archive
from pipelines.dataset.manifest import Shard
from pipelines.dataset.rows import ColumnBuffer, arrow_schema, fixed_fields
from pipelines.dataset.schema import LABEL_FIELD, label_vector
from pipelines.dataset.statistics import BandSums


@dataclass(frozen=True)
class ShardPlan:
    """The rows of one file."""

    file: str
    """Path relative to the dataset's folder."""
    ids: list[str]
    labels: list[list[int]]
    paths: list[list[str]]
    rows_per_group: int


@dataclass(frozen=True)
class WrittenShard:
    """What one task reports."""

    shard: Shard
    class_counts: list[int]
    band_sums: dict[str, BandSums]


def write_shard(
    plan: ShardPlan, archive: Archive, dataset: Path, progress: Callable[[int], None] = lambda rows: None
) -> WrittenShard:
    """Read the planned samples and write them as one Parquet file that can be mapped.

    Args:
        plan: Rows of the file.
        archive: Where they are read from.
        dataset: Folder of the dataset.
        progress: Called with the number of rows since the last call.

    Raises:
        BadRecordError: A sample cannot be read; no file is left.
    """
    description = archive.description
    class_count = len(description.class_names)
    capacity = min(plan.rows_per_group, len(plan.ids))
    columns = {
        name: ColumnBuffer(shape, dtype, capacity)
        for name, (shape, dtype) in fixed_fields(description.groups, class_count).items()
    }
    schema = arrow_schema(description.groups, class_count)
    names = [group.name for group in description.groups]
    class_counts = np.zeros(class_count, np.int64)
    sums: dict[str, BandSums] = {}
    row_groups = []

    target = dataset / plan.file
    target.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique, so a second attempt of the same task cannot write into the first one's file.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with pq.ParquetWriter(
            temporary, schema, compression="none", use_dictionary=False, write_statistics=False, data_page_size=1 << 30
        ) as writer:
            for start in range(0, len(plan.ids), plan.rows_per_group):
                rows = range(start, min(start + plan.rows_per_group, len(plan.ids)))
                for place, row in enumerate(rows):
                    labels = label_vector(plan.labels[row], class_count)
                    class_counts += labels
                    columns[LABEL_FIELD].row(place)[:] = labels
                    archive.read(plan.paths[row], {name: columns[name].row(place) for name in names})
                for group in description.groups:
                    added = BandSums.of(columns[group.name].values(len(rows)))
                    sums[group.name] = sums[group.name] + added if group.name in sums else added
                arrays = [pa.array(plan.ids[rows.start : rows.stop], pa.string())]
                arrays += [column.arrow(len(rows)) for column in columns.values()]
                writer.write_table(pa.table(arrays, schema=schema), row_group_size=len(rows))
                row_groups.append(len(rows))
                progress(len(rows))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    shard = Shard(file=plan.file, row_groups=tuple(row_groups), size=target.stat().st_size)
    return WrittenShard(shard, class_counts.tolist(), sums)
