"""Writes `_common_metadata`, which Petastorm's readers expect in the folder of a split."""

import json
from collections.abc import Sequence
from pathlib import PurePosixPath

import pyarrow.parquet as pq

from pipelines.dataset.format.manifest import Shard
from pipelines.dataset.format.petastorm_schema import ROW_GROUPS_PER_FILE_KEY, UNISCHEMA_KEY, pickled_schema
from pipelines.dataset.format.rows import arrow_schema
from pipelines.sample import ImageGroup
from pipelines.storage.folder import Location


def write_petastorm_metadata(
    folder: Location, shards: Sequence[Shard], groups: Sequence[ImageGroup], class_count: int
) -> None:
    """Write Petastorm's schema and the row groups per file, which the writer already knows.

    `petastorm.etl.materialize_dataset` would read every footer again in its own Spark job.
    """
    row_groups = {PurePosixPath(shard.file).name: len(shard.row_groups) for shard in shards}
    metadata = {
        # Petastorm's reader unpickles this value with a list of allowed classes. Our reader never reads it.
        UNISCHEMA_KEY: pickled_schema(groups, class_count),
        ROW_GROUPS_PER_FILE_KEY: json.dumps(row_groups).encode(),
    }
    with folder.new_file("_common_metadata") as path:
        pq.write_metadata(arrow_schema(groups, class_count).with_metadata(metadata), path)
