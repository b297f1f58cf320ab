"""What earlier runs left: whether it is ours and of the same samples and settings, and what of it is still good."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipelines.archives.archive import (
    REJECTED_SCHEMA,
    Archive,
    ArchiveDescription,
    ArchiveIndex,
    BadRecordError,
    read_sample,
)
from pipelines.archives.files import is_local
from pipelines.dataset.files import INDEX_FILE, MARK_FILE, is_progress
from pipelines.dataset.identity import Identity, describe
from pipelines.dataset.index import compare, has_digest, keep_known, read_index
from pipelines.dataset.manifest import FILE_NAME, Manifest, read_manifest
from pipelines.dataset.notes import WrittenShard, read_all_notes, read_notes
from pipelines.dataset.shard import ShardPlan
from pipelines.dataset.staging import read_mark, staging_of
from pipelines.storage import Folder

Plans = dict[str, list[ShardPlan]]
_THREADS, _REMOTE_THREADS = 8, 32
_log = logging.getLogger(__name__)
OVERWRITE, RESTART = "--set prepare.overwrite=true", "--set prepare.restart=true"


@dataclass(frozen=True)
class Existing:
    """Shards that an earlier run wrote."""

    folder: Folder
    identity: Identity
    """What they were written of."""
    notes: dict[str, WrittenShard]
    sizes: dict[str, int]
    """Bytes of every file in the folder."""
    manifest: Manifest | None
    """None: the dataset is unfinished."""

    @property
    def is_old(self) -> bool:
        """Whether it is a finished dataset of format version 1, which keeps no notes."""
        return self.manifest is not None and self.manifest.format_version == 1 and INDEX_FILE not in self.sizes

    @property
    def advice(self) -> str:
        """Tell how to continue with other settings or another archive."""
        if self.manifest is None:
            return f"choose another dataset.path, or discard the unfinished work with {RESTART}"
        return f"choose another dataset.path, or replace the dataset with {OVERWRITE}"


@dataclass(frozen=True)
class Usable:
    """The shards that need not be written again."""

    shards: dict[str, tuple[WrittenShard, Folder]]
    """Shards by file: what is in each, and in which folder it is."""
    problems: dict[str, int]
    """How many are to be written again, by reason."""


def find_finished(dataset: Folder) -> Existing | None:
    """Look at the dataset's folder; None where there is no finished dataset.

    Raises:
        ValueError: There is something else, or the dataset's `dataset.json` is damaged.
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
    found = read_all_notes(dataset)
    identity, notes = found if found is not None else (_identity_of(manifest), {})
    return Existing(dataset, identity, notes, dataset.files(), manifest)


def _identity_of(manifest: Manifest) -> Identity:
    """What `dataset.json` tells of settings and samples, where the notes are lost."""
    description = ArchiveDescription(manifest.archive, manifest.task, manifest.class_names, manifest.groups)
    described = describe(description, manifest.read_settings or {})
    return Identity({"format": manifest.format_version, **manifest.settings, **described}, manifest.source_fingerprint)


def find_unfinished(dataset: Folder) -> Existing | None:
    """Look at the folder of an unfinished dataset; None where there is none.

    Raises:
        ValueError: Something else is there.
    """
    staging = staging_of(dataset)
    mark = read_mark(staging)
    if mark is None:
        # A job that is killed while it writes its mark leaves the beginning of it.
        if dataset.is_local and (not all(map(is_progress, staging.files())) or staging.path.is_file()):
            raise ValueError(
                f"{staging} is in the way and is not ours: move it elsewhere, or choose another dataset.path"
            )
        return None
    sizes = staging.files()
    shards = [name for name in sizes if name.endswith(".parquet") and name.split("/")[0] in mark.splits]
    return Existing(staging, mark.identity, read_notes(staging, shards), sizes, None)


def refuse_another(existing: Existing, identity: Identity) -> None:
    """Make sure that the settings are the same.

    Raises:
        ValueError: They are not; names the differences.
    """
    differences = existing.identity.differences(identity)
    if differences:
        raise ValueError(f"{existing.folder} was made otherwise ({'; '.join(differences)}): {existing.advice}")


def check_old(existing: Existing, identity: Identity, index: ArchiveIndex) -> None:
    """Look at a dataset of format version 1. It keeps no notes: it can be left as it is, or replaced.

    Raises:
        ValueError: It has other settings, is not whole, or has another number of samples than the archive.
    """
    refuse_another(existing, identity)
    assert existing.manifest is not None
    shards = [shard for split in existing.manifest.splits.values() for shard in split.shards]
    damaged = [shard.file for shard in shards if existing.sizes.get(shard.file) != shard.size]
    if damaged:
        raise ValueError(
            f"{existing.folder}: {len(damaged)} shards are missing or of another size, the first is {damaged[0]}. A "
            f"dataset of format version 1 cannot be repaired: {existing.advice}"
        )
    before = sum(shard.rows for shard in shards) + sum(existing.manifest.skipped.values())
    now = len(index.samples) + len(index.rejected)
    if before != now:
        raise ValueError(f"the archive has {now} samples, {existing.folder} was made of {before}: {existing.advice}")


def reconcile(existing: Existing, index: ArchiveIndex, plan: Callable[[ArchiveIndex], Plans]) -> ArchiveIndex:
    """Make sure that finished shards and the archive agree; returns the index to continue with.

    Samples that were rejected or not written yet may have other labels and files now, and files of samples that are
    in a finished shard may be gone: what is known of them is kept.

    Raises:
        ValueError: The archive's samples changed; says how many.
    """
    if has_digest(index.samples, existing.identity.index):
        return index
    before = read_index(existing.folder)
    is_finished = existing.manifest is not None
    if is_finished and before is not None and not has_digest(before, existing.identity.index):
        before = None  # it is that of other shards
    if before is None:
        if not existing.notes and not is_finished:
            return index
        raise ValueError(f"the archive changed since {existing.folder} was written: {existing.advice}")
    index = keep_known(before, index)
    if is_finished and not existing.notes:  # they are lost: any sample may be in a shard
        settled = set(before["id"].to_pylist())
    else:
        settled = _settled(existing, plan(ArchiveIndex(before, REJECTED_SCHEMA.empty_table())))
    changes = compare(before, index.samples).of(settled)
    if settled and changes:
        raise ValueError(f"the archive changed since {existing.folder} was written ({changes}): {existing.advice}")
    return index


def _settled(existing: Existing, plans: Plans) -> set[str]:
    """The samples whose rows are in a finished shard."""
    settled: set[str] = set()
    for plan in all_of(plans):
        note = existing.notes.get(plan.file)
        if note is not None and note.digest == plan.digest:
            settled |= set(plan.table["id"].to_pylist()) - {row["id"] for row in note.rejected}
    return settled


def find_usable(existing: Existing, plans: Plans, archive: Archive) -> Usable:
    """Find the shards that are there, of the planned samples, and whose rejected records are still bad."""
    usable: dict[str, tuple[WrittenShard, Folder]] = {}
    problems: Counter[str] = Counter()
    for plan in all_of(plans):
        note, size = existing.notes.get(plan.file), existing.sizes.get(plan.file)
        if size is None:
            problems["missing"] += 1
        elif note is None or note.digest != plan.digest:
            problems["of other samples"] += 1
        elif note.shard.size != size:
            problems["of another size"] += 1
        else:
            usable[plan.file] = note, existing.folder
    changed = _with_mended_records([plan for plan in all_of(plans) if plan.file in usable], existing, archive)
    return without(Usable(usable, dict(problems)), changed, "with rejected records that can be read now")


def _with_mended_records(plans: list[ShardPlan], existing: Existing, archive: Archive) -> set[str]:
    """The shards of which a rejected record can be read now.

    A shard keeps its rows where files of some of them are gone: it would be written again without these.
    """
    tries: list[tuple[str, dict[str, Any]]] = []
    for plan in plans:
        before = {row["id"]: row for row in existing.notes[plan.file].rejected}
        unusable = {row["id"]: row for row in plan.unusable}
        if not before:
            continue
        gone = sorted(unusable.keys() - before.keys())
        if gone:
            _log.warning(
                "%s is not written again, as samples of it would be lost: %d cannot be read any more, such as %s (%s)",
                *(plan.file, len(gone), gone[0], unusable[gone[0]]["reason"]),
            )
            continue
        tries += [
            (plan.file, sample)
            for sample in plan.table.to_pylist()
            if sample["id"] in before and sample["id"] not in unusable
        ]
    with ThreadPoolExecutor(_THREADS if is_local(archive.root) else _REMOTE_THREADS) as pool:
        outcomes = pool.map(partial(_is_readable, archive), [sample for _, sample in tries])
        return {file for (file, _), is_readable in zip(tries, outcomes, strict=True) if is_readable}


def _is_readable(archive: Archive, sample: dict[str, Any]) -> bool:
    try:
        read_sample(archive, sample["paths"])
    except BadRecordError:
        return False
    return True


def without(usable: Usable, files: Collection[str], reason: str) -> Usable:
    """Leave out some shards."""
    problems = {**usable.problems, reason: len(files)} if files else usable.problems
    return Usable({file: found for file, found in usable.shards.items() if file not in files}, problems)


def merge(first: Usable, second: Usable) -> Usable:
    """Take the shards of both, of a shard that both have the first's."""
    return Usable({**second.shards, **first.shards}, first.problems or second.problems)


def all_of(plans: Plans) -> list[ShardPlan]:
    """Give the shards of all splits."""
    return [plan for shards in plans.values() for plan in shards]


def rejected_of(usable: Iterable[WrittenShard]) -> list[dict[str, str]]:
    """Give the rejected records of some shards."""
    return [row for written in usable for row in written.rejected]
