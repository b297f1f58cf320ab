"""Decides which sample belongs to which shard."""

import hashlib
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.archives.archive import Archive, ArchiveIndex
from pipelines.dataset.format.files import shard_name
from pipelines.dataset.format.manifest import FORMAT_VERSION
from pipelines.dataset.format.rows import fixed_fields
from pipelines.dataset.prepare.identity import describe
from pipelines.dataset.prepare.shard import ShardPlan


def plan_shards(
    archive: Archive, index: ArchiveIndex, *, row_group_mib: int, row_groups_per_shard: int, seed: int
) -> dict[str, list[ShardPlan]]:
    """Shuffle each split once and cut it into shards whose sizes differ by at most one row.

    An unusable sample has its position like any other, so that it can be added later without moving others.

    Args:
        archive: The archive; its classes and image groups decide a row's size.
        index: Index of all samples.
        row_group_mib: Uncompressed MiB per row group.
        row_groups_per_shard: Number of row groups of the fullest shard.
        seed: Seed of the shuffle.
    """
    description = archive.description
    fields = fixed_fields(description.groups, len(description.class_names)).values()
    row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields)
    rows_per_group = max(1, row_group_mib * 2**20 // row_bytes)
    layout = json.dumps(
        [FORMAT_VERSION, rows_per_group, describe(description, archive.read_settings)], sort_keys=True
    ).encode()
    samples, unusable = index.samples, {row["id"]: row for row in index.unusable.to_pylist()}
    plans: dict[str, list[ShardPlan]] = {}
    for number, split in enumerate(sorted(pc.unique(samples["split"]).to_pylist())):
        rows = np.flatnonzero(pc.equal(samples["split"], split).to_numpy(zero_copy_only=False))
        shuffled = samples.take(pa.array(np.random.default_rng([seed, number]).permutation(rows)))
        shard_count = math.ceil(len(rows) / (rows_per_group * row_groups_per_shard))
        ends = [len(rows) * (shard + 1) // shard_count for shard in range(shard_count)]
        plans[split] = []
        for shard, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            part = shuffled.slice(start, end - start)
            stream = _stream(part)
            plan = ShardPlan(
                file=shard_name(split, shard),
                samples=stream,
                rows=end - start,
                rows_per_group=rows_per_group,
                digest=hashlib.sha256(layout + stream).hexdigest(),
                unusable=_known(part, unusable),
            )
            plans[split].append(plan)
    return plans


def _known(samples: pa.Table, unusable: dict[str, dict[str, str]]) -> tuple[dict[str, str], ...]:
    if not unusable:
        return ()
    return tuple(unusable[name] for name in samples["id"].to_pylist() if name in unusable)


def _stream(table: pa.Table) -> bytes:
    """Serialise a slice alone; its pickle would contain the whole table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
