"""The results of earlier runs: whether they are ours, have the same samples and settings, and are still good."""

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipelines.archives.archive import (
    REJECTED_SCHEMA,
    Archive,
    ArchiveDescription,
    ArchiveIndex,
)
from pipelines.dataset.format.files import is_progress
from pipelines.dataset.format.manifest import FILE_NAME, Manifest, read_manifest
from pipelines.dataset.prepare.identity import Identity, compare, describe, index_digest, read_index, with_known_samples
from pipelines.dataset.prepare.notes import WrittenShard, read_all_notes, read_earlier_notes, read_notes
from pipelines.dataset.prepare.shard import ShardPlan, is_readable
from pipelines.dataset.prepare.staging import read_mark, staging_of
from pipelines.storage.folder import Location
from pipelines.storage.inventory import MARK_FILE
from pipelines.storage.locations import is_url

Plans = dict[str, list[ShardPlan]]
_THREADS, _REMOTE_THREADS = 8, 32
OVERWRITE, RESTART = "--set prepare.overwrite=true", "--set prepare.restart=true"


@dataclass(frozen=True)
class Existing:
    """Shards that an earlier run wrote."""

    folder: Location
    identity: Identity
    """Identity with which the shards were written."""
    notes: dict[str, WrittenShard]
    sizes: dict[str, int]
    """Size in bytes of every file in the folder."""
    manifest: Manifest | None
    """None: the dataset is unfinished."""
    earlier_notes: dict[str, tuple[WrittenShard, bytes]] = field(default_factory=dict)
    """Content of shards that a job was about to rewrite, and their samples."""

    @property
    def advice(self) -> str:
        """Advice how to continue with other settings or another archive."""
        if self.manifest is None:
            return f"choose another dataset.path, or discard the unfinished work with {RESTART}"
        return f"choose another dataset.path, or replace the dataset with {OVERWRITE}"


@dataclass(frozen=True)
class EarlierShard:
    """A shard that an earlier run wrote."""

    plan: ShardPlan
    """Plan of the shard, with its samples as they were when it was written."""
    written: WrittenShard
    folder: Location
    whole: frozenset[str] | None = None
    """Ids of the rows that are not damaged; None if the shard is not known to be damaged."""

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the samples in the shard whose rows are not known to be damaged."""
        ids = frozenset(self.plan.table["id"].to_pylist()) - {row["id"] for row in self.written.rejected}
        return ids if self.whole is None else ids & self.whole


@dataclass(frozen=True)
class Usable:
    """The usable results of earlier runs."""

    shards: dict[str, EarlierShard]
    """Shards that need not be rewritten, by file."""
    problems: dict[str, str]
    """Reasons to rewrite the other shards, by file."""
    to_rewrite: dict[str, EarlierShard]
    """Shards to rewrite that have good rows, which must not be lost, by file."""


def find_finished(dataset: Location) -> Existing | None:
    """Read the dataset's folder; None if it holds no finished dataset.

    Raises:
        ValueError: The folder holds something else, or its `dataset.json` is damaged.
    """
    if not dataset.exists(FILE_NAME):
        files = dataset.files()
        started = MARK_FILE in files or (files and all(map(is_progress, files)))
        if (files or (dataset.is_local and dataset.exists())) and not (started and not dataset.is_local):
            raise ValueError(
                f"{dataset} exists and is not a dataset: choose another dataset.path, or remove the folder"
            )
        return None
    manifest = read_manifest(dataset)
    identity, notes = read_all_notes(dataset) or (_identity_of(manifest), {})
    return Existing(dataset, identity, notes, dataset.files(), manifest)


def _identity_of(manifest: Manifest) -> Identity:
    """Return the settings and samples that `dataset.json` describes, for the case that the markers are lost."""
    described = describe(
        ArchiveDescription(manifest.archive, manifest.task, manifest.class_names, manifest.groups),
        manifest.read_settings,
    )
    return Identity({"format": manifest.format_version, **manifest.settings, **described}, manifest.source_fingerprint)


def find_unfinished(dataset: Location) -> Existing | None:
    """Read the folder of an unfinished dataset; None if there is none.

    Raises:
        ValueError: The folder holds something else.
    """
    staging = staging_of(dataset)
    mark = read_mark(staging)
    if mark is None:
        # A job that is killed while it writes its mark leaves an incomplete one.
        if dataset.is_local and (not all(map(is_progress, staging.files())) or staging.path.is_file()):
            raise ValueError(
                f"{staging} is in the way and is not ours: move it elsewhere, or choose another dataset.path"
            )
        return None
    sizes = staging.files()
    shards = [name for name in sizes if name.endswith(".parquet") and name.split("/")[0] in mark.splits]
    return Existing(
        staging, mark.identity, read_notes(staging, shards), sizes, None, read_earlier_notes(staging, shards)
    )


def reconcile(
    existing: Existing, identity: Identity, index: ArchiveIndex, plan: Callable[[ArchiveIndex], Plans]
) -> tuple[ArchiveIndex, Plans]:
    """Make sure that finished shards agree with the settings and the archive.

    Samples that were rejected or not yet written may have other labels and files now. Files of samples in a finished
    shard may have been deleted: their recorded metadata is kept.

    Returns:
        The index to continue with, and the shards as they were planned if the index was different then.

    Raises:
        ValueError: The settings differ; the message names the differences. Or the archive's samples changed; the
            message says how many.
    """
    differences = existing.identity.differences(identity)
    if differences:
        raise ValueError(f"{existing.folder} was made otherwise ({'; '.join(differences)}): {existing.advice}")
    if index_digest(index.samples) == existing.identity.index:
        return index, {}
    before = read_index(existing.folder)
    is_finished = existing.manifest is not None
    if is_finished and before is not None and index_digest(before) != existing.identity.index:
        before = None  # it belongs to other shards
    if before is None:
        if not existing.notes and not is_finished:
            return index, {}
        raise ValueError(f"the archive changed since {existing.folder} was written: {existing.advice}")
    index = with_known_samples(before, index)
    earlier = plan(ArchiveIndex(before, REJECTED_SCHEMA.empty_table()))
    notes_are_lost = is_finished and not existing.notes  # so any sample may be in a shard
    settled = set(before["id"].to_pylist()) if notes_are_lost else _settled(existing, earlier)
    changes = compare(before, index.samples, settled)
    if settled and changes:
        raise ValueError(f"the archive changed since {existing.folder} was written ({changes}): {existing.advice}")
    return index, earlier


def _settled(existing: Existing, plans: Plans) -> set[str]:
    """Return the ids of the samples whose rows are in a finished shard."""
    settled: set[str] = set()
    for plan in all_of(plans):
        note = existing.notes.get(plan.file)
        if note is not None and note.digest == plan.digest:
            settled |= EarlierShard(plan, note, existing.folder).ids
        elif (found := _find_earlier(existing, plan)) is not None:
            settled |= found.ids
    return settled


def find_usable(existing: Existing, plans: Plans, earlier: Plans, archive: Archive) -> Usable:
    """Find the existing shards that hold the planned samples and whose rejected records are still bad.

    Args:
        existing: Results of an earlier run.
        plans: All shards.
        earlier: The shards as they were planned by the earlier run, where they are known to differ.
        archive: The archive, in which the rejected records are tried again.
    """
    shards: dict[str, EarlierShard] = {}
    problems: dict[str, str] = {}
    to_rewrite: dict[str, EarlierShard] = {}
    before = {plan.file: plan for plan in all_of(earlier)}
    for plan in all_of(plans):
        file, size = plan.file, existing.sizes.get(plan.file)
        note = existing.notes.get(file)
        if note is not None and (note.digest, note.shard.size) == (plan.digest, size):
            shards[file] = EarlierShard(plan, note, existing.folder)
            continue
        is_same = note is not None and note.digest == plan.digest
        problems[file] = "missing" if size is None else "of another size" if is_same else "of other samples"
        other = before.get(file, plan)
        if note is not None and (note.digest, note.shard.size) == (other.digest, size):
            to_rewrite[file] = EarlierShard(other, note, existing.folder)
        elif (found := _find_earlier(existing, plan)) is not None:
            to_rewrite[file] = found
    for file in _with_mended_records(shards.values(), archive):
        problems[file] = "with rejected records that can be read now"
        to_rewrite[file] = shards.pop(file)
    return Usable(shards, problems, to_rewrite)


def _find_earlier(existing: Existing, plan: ShardPlan) -> EarlierShard | None:
    """Return the existing shard with the name of a planned one, if a job stopped before it wrote the planned one."""
    written, samples = existing.earlier_notes.get(plan.file, (None, b""))
    if written is None or written.shard.size != existing.sizes.get(plan.file):
        return None
    earlier = replace(plan, samples=samples, digest=written.digest)
    has_same_ids = earlier.table["id"].to_pylist() == plan.table["id"].to_pylist()
    return EarlierShard(earlier, written, existing.folder) if has_same_ids else None


def _with_mended_records(shards: Iterable[EarlierShard], archive: Archive) -> list[str]:
    """Return the shards with a rejected record that is readable now."""
    tries: list[tuple[str, dict[str, Any]]] = []
    for found in shards:
        plan = found.plan
        before = {row["id"] for row in found.written.rejected} - {row["id"] for row in plan.unusable}
        if before:
            tries += [(plan.file, sample) for sample in plan.table.to_pylist() if sample["id"] in before]
    with ThreadPoolExecutor(_REMOTE_THREADS if is_url(archive.root) else _THREADS) as pool:
        outcomes = pool.map(partial(is_readable, archive), [sample for _, sample in tries])
        return sorted({file for (file, _), is_readable in zip(tries, outcomes, strict=True) if is_readable})


def with_damage(usable: Usable, damaged: Mapping[str, Collection[str]]) -> Usable:
    """Mark damaged shards for rewriting.

    Args:
        usable: The shards that were found.
        damaged: Ids of the rows that are not damaged, by file of each damaged shard.
    """
    found = {**usable.to_rewrite, **usable.shards}
    to_rewrite = {file: replace(found[file], whole=frozenset(whole)) for file, whole in damaged.items()}
    shards = {file: one for file, one in usable.shards.items() if file not in damaged}
    return Usable(
        shards, {**usable.problems, **dict.fromkeys(damaged, "with damaged rows")}, {**usable.to_rewrite, **to_rewrite}
    )


def merge(first: Usable, second: Usable) -> Usable:
    """Take the shards of both; of a shard in both, the one with more samples, or else the first's."""
    shards = _merged(first.shards, second.shards)
    to_rewrite = {
        file: found for file, found in _merged(first.to_rewrite, second.to_rewrite).items() if file not in shards
    }
    return Usable(shards, first.problems or second.problems, to_rewrite)


def _merged(first: dict[str, EarlierShard], second: dict[str, EarlierShard]) -> dict[str, EarlierShard]:
    found = [*second.items(), *first.items()]
    # The sort is stable: with equally many rejected records the shard of `first`, which is later, wins.
    return dict(sorted(found, key=lambda item: -len(item[1].written.rejected)))


def all_of(plans: Plans) -> list[ShardPlan]:
    """Return the shards of all splits."""
    return [plan for shards in plans.values() for plan in shards]
