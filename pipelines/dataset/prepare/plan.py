"""Decides which sample belongs to which shard, and which shards are written."""

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.archives.archive import Archive, ArchiveIndex
from pipelines.dataset.format.manifest import FORMAT_VERSION
from pipelines.dataset.format.rows import fixed_fields
from pipelines.dataset.prepare.identity import Identity, describe, index_digest, with_rows
from pipelines.dataset.prepare.notes import WrittenShard
from pipelines.dataset.prepare.shard import ShardPlan, equal_parts, stream_of, unusable_of
from pipelines.dataset.prepare.survey import OVERWRITE, Plans, Usable, all_of
from pipelines.storage.folder import Location

_log = logging.getLogger(__name__)
Rejected = Sequence[Mapping[str, str]]
"""Rows of `REJECTED_SCHEMA`."""


def plan_shards(
    archive: Archive, index: ArchiveIndex, *, row_group_mib: int, row_groups_per_shard: int, seed: int
) -> Plans:
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
    plans: Plans = {}
    for number, split in enumerate(sorted(pc.unique(samples["split"]).to_pylist())):
        rows = np.flatnonzero(pc.equal(samples["split"], split).to_numpy(zero_copy_only=False))
        shuffled = samples.take(pa.array(np.random.default_rng([seed, number]).permutation(rows)))
        shard_count = math.ceil(len(rows) / (rows_per_group * row_groups_per_shard))
        plans[split] = []
        for shard, part in enumerate(equal_parts(shuffled, shard_count)):
            stream = stream_of(part)
            plans[split].append(
                ShardPlan(
                    file=f"{split}/part-{shard:05d}.parquet",
                    samples=stream,
                    rows=len(part),
                    rows_per_group=rows_per_group,
                    digest=hashlib.sha256(layout + stream).hexdigest(),
                    unusable=unusable_of(part, unusable),
                )
            )
    return plans


@dataclass(frozen=True)
class ShardInventory:
    """The shards to write, and those that exist."""

    index: ArchiveIndex
    settings: Identity
    """Settings and classes, without the digest of the samples."""
    plans: Plans
    usable: Usable
    damaged: dict[str, Rejected] = field(default_factory=dict)
    """Shards that stay damaged, by file, with the samples that rewriting would lose."""

    @cached_property
    def identity(self) -> Identity:
        """Identity of the dataset."""
        return replace(self.settings, index=index_digest(self.index.samples))

    @property
    def written(self) -> dict[str, WrittenShard]:
        """Shards that need not be rewritten."""
        return {file: found.written for file, found in self.usable.shards.items()}

    @property
    def total(self) -> int:
        """Number of all samples of the archive."""
        return len(self.index.samples) + len(self.index.rejected)

    def to_write(self) -> list[ShardPlan]:
        """Return all shards; a shard that replaces another one lists the samples that it must contain."""
        known = self.usable.to_rewrite
        return [
            replace(plan, required=known[plan.file].ids) if plan.file in known else plan for plan in all_of(self.plans)
        ]

    def rejected(self, written: Mapping[str, WrittenShard]) -> list[dict[str, str]]:
        """Return every known bad record: for a finished shard those found in it, for others those of the index."""
        rows = list(self.index.rejected.to_pylist())
        for plan in all_of(self.plans):
            rows += written[plan.file].rejected if plan.file in written else plan.unusable
        return rows

    def without_losses(self) -> "ShardInventory":
        """Leave shards unchanged if, according to the index, rewriting them would lose good rows."""
        lost = {plan.file: [row for row in plan.unusable if row["id"] in plan.required] for plan in self.to_write()}
        return self.leaving({file: rows for file, rows in lost.items() if rows})

    def leaving(self, lost: Mapping[str, Rejected]) -> "ShardInventory":
        """Leave shards unchanged, with all that was known about their samples when they were written.

        Args:
            lost: Samples that rewriting would lose, by file of each shard.
        """
        if not lost:
            return self
        for file, rows in lost.items():
            _log.warning(
                "%s is not written again, as samples of it would be lost: %d cannot be read any more, such as %s (%s)",
                *(file, len(rows), rows[0]["id"], rows[0]["reason"]),
            )
        earlier = {file: self.usable.to_rewrite[file] for file in lost}
        # Other labels of a bad record, which came with its folder, would make it a shard of other samples.
        planned = {plan.digest for plan in all_of(self.plans)}
        known = [found.plan.table for found in earlier.values() if found.plan.digest not in planned]
        samples = with_rows(self.index.samples, pa.concat_tables(known)) if known else self.index.samples
        return replace(
            self,
            index=replace(self.index, samples=samples),
            plans={
                split: [earlier[plan.file].plan if plan.file in earlier else plan for plan in shards]
                for split, shards in self.plans.items()
            },
            usable=Usable(
                {**self.usable.shards, **earlier},
                {file: reason for file, reason in self.usable.problems.items() if file not in earlier},
                {file: found for file, found in self.usable.to_rewrite.items() if file not in earlier},
            ),
            damaged={**self.damaged, **{file: lost[file] for file in earlier if earlier[file].whole is not None}},
        )

    def check_repaired(self, dataset: Location) -> None:
        """Make sure that no damaged shard is left unchanged.

        Raises:
            RuntimeError: Some shards are; the message says how many rows each repair would lose.
        """
        if not self.damaged:
            return
        rows = [row for lost in self.damaged.values() for row in lost]
        raise RuntimeError(
            f"{dataset}: {len(self.damaged)} damaged shards are not replaced, the first is {next(iter(self.damaged))}: "
            f"{len(rows)} good rows would be lost, as their samples cannot be read any more, such as {rows[0]['id']} "
            f"({rows[0]['reason']}); put their files back, and the same command repairs the shards, or make the "
            f"dataset without them with {OVERWRITE}; everything else is finished"
        )


def problems(usable: Usable) -> str:
    """Return the reasons for which shards are rewritten."""
    reasons = [f"{count} shards {reason}" for reason, count in Counter(usable.problems.values()).items()]
    return ", ".join(reasons) or "what describes the shards is lost or out of date"
