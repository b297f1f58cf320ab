"""Checks that a dataset holds what was written: every file, row and id, as `dataset.json` says."""

import errno
import hashlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.dataset.format.columns import ID_FIELD, LABEL_FIELD, plain_values
from pipelines.dataset.format.encoding import array_bytes, computed_checksums, encoded, is_encoded, stored_checksums
from pipelines.dataset.format.manifest import Manifest, Shard, read_manifest
from pipelines.dataset.format.rows import Fields, fixed_fields
from pipelines.storage.folder import Location

_NAMED_AT_MOST = 3


@dataclass(frozen=True)
class ShardCheck:
    """Result of checking one shard."""

    file: str
    """Path relative to the dataset's folder."""
    damage: str | None
    """Description of the damage; None without damage."""
    damaged_rows: tuple[int, ...] = ()
    """Positions in the file of rows that differ from their checksums; empty if no row could be read."""
    ids: tuple[str, ...] = ()
    """Ids of all rows, in file order; empty if the shard could not be read."""
    class_counts: tuple[int, ...] = ()

    @property
    def whole_ids(self) -> frozenset[str]:
        """Ids of the rows that are as they were written; empty if the shard could not be read."""
        damaged = {*self.damaged_rows}
        return frozenset(name for row, name in enumerate(self.ids) if row not in damaged)

    def __str__(self) -> str:
        """Return the shard and its damage in one line."""
        return f"{self.file} {self.damage or 'is whole'}"


@dataclass(frozen=True)
class CheckProgress:
    """Progress of checking a dataset."""

    done: int
    """Number of rows in the checked shards."""
    total: int
    damaged_shards: int


@dataclass(frozen=True)
class DatasetCheck:
    """Result of checking a dataset."""

    shards: int
    rows: int
    damaged: tuple[ShardCheck, ...] = ()
    """Missing or damaged shards, in the dataset's order."""
    problems: tuple[str, ...] = ()
    """Errors of the dataset whose shards are whole: repeated ids, other class counts."""

    @property
    def is_whole(self) -> bool:
        """Whether no damage or error was found."""
        return not self.damaged and not self.problems


def verify_dataset(
    dataset: Location | Path | str,
    *,
    threads: int = 4,
    progress: Callable[[CheckProgress], None] = lambda progress: None,
) -> DatasetCheck:
    """Read every row of a dataset and compare it with `dataset.json`.

    Args:
        dataset: Folder of the dataset.
        threads: Number of shards that are read at the same time; each takes the memory of about two row groups.
        progress: Called after each shard, in this thread.

    Raises:
        FileNotFoundError: The dataset does not exist.
        ValueError: `dataset.json` is damaged or was changed.
        RuntimeError: The storage cannot be used.
        OSError: A file cannot be read for another reason than damage, such as its permissions.
    """
    folder = Location.at(dataset)
    manifest = read_manifest(folder)
    fields = fixed_fields(manifest.groups, len(manifest.class_names))
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    total, done = sum(shard.rows for shard in shards), 0
    checks: dict[str, ShardCheck] = {}
    pool = ThreadPoolExecutor(threads, thread_name_prefix="groundswell-verify")
    try:
        found = pool.map(lambda shard: check_shard(folder, shard, fields), shards)
        for shard, check in zip(shards, found, strict=True):
            checks[shard.file] = check
            done += shard.rows
            progress(CheckProgress(done, total, sum(check.damage is not None for check in checks.values())))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    damaged = tuple(check for check in checks.values() if check.damage is not None)
    problems = (*_repeated_ids(manifest, checks), *_wrong_class_counts(manifest, checks))
    return DatasetCheck(len(shards), total, damaged, problems)


def check_shard(dataset: Location, shard: Shard, fields: Fields) -> ShardCheck:
    """Read one shard and compare it with its description.

    Args:
        dataset: Folder of the dataset.
        shard: Description of the shard, made when it was written.
        fields: Columns of fixed width, from `rows.fixed_fields`.

    Raises:
        RuntimeError: The storage cannot be used.
        OSError: The file cannot be read for another reason than damage, such as its permissions.
    """
    size = dataset.size(shard.file)
    if size is None:
        return ShardCheck(shard.file, "is missing")
    if size != shard.size:
        return ShardCheck(shard.file, f"has {size} bytes, its manifest says {shard.size}")
    try:
        with dataset.open(shard.file) as file, pq.ParquetFile(file, pre_buffer=not dataset.is_local) as parquet:
            return _check_rows(parquet, shard, fields)
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        # pyarrow's errors about the content have no number; EIO is a lost sector of the disk.
        number = getattr(error, "errno", None)
        if number is not None and not (dataset.is_local and number == errno.EIO):
            raise
        return ShardCheck(shard.file, f"cannot be read: {error}")


def _check_rows(parquet: pq.ParquetFile, shard: Shard, fields: Fields) -> ShardCheck:
    rows = tuple(parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups))
    if rows != shard.row_groups:
        return ShardCheck(shard.file, f"has row groups of {rows} rows, its manifest says {shard.row_groups}")
    if ID_FIELD not in parquet.schema_arrow.names:  # reading the other columns names one that is missing
        return ShardCheck(shard.file, f"has no column {ID_FIELD!r}")
    digest = hashlib.sha256()
    ids: list[str] = []
    wrong: list[int] = []
    counts = np.zeros(fields[LABEL_FIELD][0], np.int64)
    for number in range(len(rows)):
        source = parquet.read_row_group(number)
        table = encoded(source, fields)
        other = [name for name in fields if not is_encoded(source[name].combine_chunks(), *fields[name])]
        if other:
            return ShardCheck(shard.file, f"has values of column {other[0]!r} with another header than was written")
        differs = stored_checksums(source) != computed_checksums(table, fields)
        wrong += (len(ids) + np.flatnonzero(differs)).tolist()
        digest.update(plain_values(source, fields))
        counts += array_bytes(table[LABEL_FIELD].combine_chunks(), *fields[LABEL_FIELD]).sum(axis=0, dtype=np.int64)
        ids += source[ID_FIELD].to_pylist()
    damage = None
    if wrong:
        named = ", ".join(f"{row} (sample {ids[row]})" for row in wrong[:_NAMED_AT_MOST])
        damage = f"has {len(wrong)} damaged rows of {len(ids)}: {named}" + ", ..." * (len(wrong) > _NAMED_AT_MOST)
    elif digest.hexdigest() != shard.content_digest:
        damage = "has ids, metadata or checksums that are not those that were written"
    return ShardCheck(shard.file, damage, tuple(wrong), tuple(ids), tuple(counts.tolist()))


def _repeated_ids(manifest: Manifest, checks: dict[str, ShardCheck]) -> list[str]:
    times = Counter(name for check in checks.values() for name in check.ids)
    repeated = [name for name, count in times.items() if count > 1]
    if not repeated:
        return []
    splits = {
        name: [
            split
            for split, content in manifest.splits.items()
            for shard in content.shards
            for other in checks[shard.file].ids
            if other == name
        ]
        for name in repeated[:_NAMED_AT_MOST]
    }
    named = "; ".join(f"{name} in {' and '.join(found)}" for name, found in splits.items())
    return [f"{len(repeated)} ids are repeated: {named}"]


def _wrong_class_counts(manifest: Manifest, checks: dict[str, ShardCheck]) -> list[str]:
    problems = []
    for split, content in manifest.splits.items():
        found = [checks[shard.file] for shard in content.shards]
        if not found or any(check.damage is not None for check in found):
            continue  # a damaged shard is already reported
        counts = np.sum([check.class_counts for check in found], axis=0).tolist()
        for name, count, stated in zip(manifest.class_names, counts, content.class_counts, strict=True):
            if count != stated:
                problems.append(f"{split} has {count} samples of class {name!r}, its manifest says {stated}")
    return problems
