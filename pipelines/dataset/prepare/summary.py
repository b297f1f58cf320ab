"""Combines the shards of a dataset into its manifest, its statistics and its list of bad records."""

import functools
import operator
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.archives.archive import REJECTED_SCHEMA, ArchiveDescription
from pipelines.dataset.format.files import REJECTED_FILE
from pipelines.dataset.format.manifest import Manifest, Split
from pipelines.dataset.format.statistics import BandSums
from pipelines.dataset.prepare.notes import WrittenShard, count_reasons
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.folder import Location


def write_rejected(rejected: list[dict[str, str]], staging: Location) -> None:
    """Write the list of bad records."""
    with staging.new_file(REJECTED_FILE) as path:
        pq.write_table(pa.Table.from_pylist(rejected, schema=REJECTED_SCHEMA), path)


def summarise(
    description: ArchiveDescription,
    written: dict[str, list[WrittenShard]],
    settings: dict[str, int],
    read_settings: Mapping[str, int | str | None],
    source: str,
    rejected: list[dict[str, str]],
) -> Manifest:
    """Describe the dataset that these shards form, by split.

    Raises:
        ValueError: A split has no good sample.
    """
    empty = [split for split, shards in sorted(written.items()) if not sum(each.shard.rows for each in shards)]
    if empty:
        raise ValueError(f"every sample of the split {' and of the split '.join(map(repr, empty))} is bad")
    return Manifest(
        archive=description.kind,
        task=description.task,
        class_names=description.class_names,
        groups=description.groups,
        splits={split: _split(shards) for split, shards in written.items()},
        statistics={name: sums.statistics() for name, sums in merge_sums(written[TRAINING_SPLIT]).items()},
        settings=settings,
        read_settings=dict(read_settings),
        source_fingerprint=source,
        skipped=count_reasons(rejected),
    )


def _split(shards: list[WrittenShard]) -> Split:
    return Split(
        shards=tuple(result.shard for result in shards),
        class_counts=tuple(np.sum([result.class_counts for result in shards], axis=0).tolist()),
    )


def merge_sums(shards: list[WrittenShard]) -> dict[str, BandSums]:
    """Add up the band sums of several shards, by image group."""
    sums = [result.band_sums for result in shards if result.band_sums]
    return {name: functools.reduce(operator.add, (part[name] for part in sums)) for name in sums[0]}
