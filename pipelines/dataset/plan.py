"""Which sample goes into which shard."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.archives.archive import ArchiveDescription, ArchiveIndex
from pipelines.dataset.rows import fixed_fields
from pipelines.dataset.shard import ShardPlan


def plan_shards(
    description: ArchiveDescription, index: ArchiveIndex, *, row_group_mib: int, row_groups_per_shard: int, seed: int
) -> dict[str, list[ShardPlan]]:
    """Shuffle each split once and cut it into shards whose sizes differ by one row at most.

    A sample that is unusable now has its place like any other, so that it can be added later without moving others.

    Args:
        description: Classes and image groups, which give a row's bytes.
        index: Every sample.
        row_group_mib: Uncompressed MiB per row group.
        row_groups_per_shard: Row groups of the fullest shard.
        seed: Of the shuffle.
    """
    fields = fixed_fields(description.groups, len(description.class_names)).values()
    row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields)
    rows_per_group = max(1, row_group_mib * 2**20 // row_bytes)
    samples, unusable = index.samples, {row["id"]: row for row in index.unusable.to_pylist()}
    plans: dict[str, list[ShardPlan]] = {}
    for number, split in enumerate(sorted(pc.unique(samples["split"]).to_pylist())):
        rows = np.flatnonzero(pc.equal(samples["split"], split).to_numpy(zero_copy_only=False))
        shuffled = samples.take(pa.array(np.random.default_rng([seed, number]).permutation(rows)))
        shard_count = math.ceil(len(rows) / (rows_per_group * row_groups_per_shard))
        ends = [len(rows) * (shard + 1) // shard_count for shard in range(shard_count)]
        plans[split] = [
            _plan(f"{split}/part-{shard:05d}.parquet", shuffled.slice(start, end - start), rows_per_group, unusable)
            for shard, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]
    return plans


def _plan(file: str, samples: pa.Table, rows_per_group: int, unusable: dict[str, dict[str, str]]) -> ShardPlan:
    known = tuple(unusable[name] for name in samples["id"].to_pylist() if name in unusable) if unusable else ()
    return ShardPlan(file, _stream(samples), len(samples), rows_per_group, known)


def _stream(table: pa.Table) -> bytes:
    """A slice alone: pickled, it would take the whole table along."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
