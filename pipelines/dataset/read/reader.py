"""Reads samples of one split from their positions in Parquet into reused memory, in an order known in advance."""

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conf.sections.dataset import ReaderConfig
from pipelines.dataset.format.columns import LABEL_FIELD
from pipelines.dataset.format.layout import RowGroup, value_bytes, value_prefix
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.dataset.format.order import epoch_order, evaluation_parts, rank_parts
from pipelines.dataset.format.rows import row_checksum
from pipelines.dataset.gather import make_gather
from pipelines.dataset.read.buffers import BufferPool, Memory
from pipelines.dataset.read.cache import default_cache_folder
from pipelines.dataset.read.split_files import REPAIR, REPAIR_VERIFIED, SplitFiles
from pipelines.machine.proc import allow_open_files
from pipelines.storage.folder import Location

Verify = Literal["first_epoch", "always", "never"]
_PROBED_ROWS = 8
_BATCHES_ADVISED = 8  # after those in flight: the operating system is asked to read their rows from disk
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReaderSettings:
    """Settings for reading rows; if the split exceeds the cache's limit, it is shuffled in windows of rows that fit."""

    threads: int = ReaderConfig.default("threads")
    """Number of threads that gather batches."""
    batches_in_flight: int = ReaderConfig.default("batches_in_flight")
    """Number of batches that are gathered ahead of the requested one, unfinished ones included."""
    cache_folder: Path = field(default_factory=default_cache_folder)
    """Folder on a local disk, for row groups that are remote or whose rows have no fixed positions."""
    cache_limit_bytes: int = int(ReaderConfig.default("cache_limit_gib") * 2**30)
    """Size of that cache; a larger split is read and shuffled in windows that fit."""
    verify: Verify = field(default=ReaderConfig.default("verify"))
    """When a row's checksum is computed; `first_epoch`: when this process reads the row for the first time."""


@dataclass(frozen=True)
class Batch:
    """Samples side by side; `weights` is 0 where a row only pads the last batch of an evaluation."""

    images: dict[str, NDArray[np.generic]]
    """Images by group, `(batch, height, width, bands)` in the stored dtype."""
    targets: NDArray[np.uint8]
    """Multi-hot, `(batch, classes)`."""
    weights: NDArray[np.float32]
    """Weights, `(batch,)`, 1 or 0."""
    rows: NDArray[np.int64]
    """Position of each sample in the split, `(batch,)`: its index in `SplitReader.ids`."""


class DamageError(ValueError):
    """The bytes of a row group differ from those that were written."""

    def __init__(self, place: int, group: RowGroup, message: str) -> None:
        """Describe the damage.

        Args:
            place: Number of the row group, in reading order.
            group: The open row group.
            message: Text that names shard, row group and row, and the remedy.
        """
        super().__init__(message)
        self.place, self.group = place, group


class SplitReader:
    """A reader with random access to the rows of one split."""

    def __init__(
        self,
        dataset: Location | Path | str,
        split: str,
        settings: ReaderSettings | None = None,
        *,
        manifest: Manifest | None = None,
    ) -> None:
        """Open every local shard of the split and check its layout.

        Args:
            dataset: Folder of the dataset.
            split: Name of the split.
            settings: Settings for reading rows.
            manifest: The dataset's manifest, possibly with only some of its shards; None: the one in the folder.

        Raises:
            FileNotFoundError: The dataset or a shard is missing.
            ValueError: The split does not exist, or a shard differs from the manifest; the message names the file.
            RuntimeError: The cache is needed, and its folder cannot be made.
        """
        self.settings = settings or ReaderSettings()
        folder = Location.at(dataset)
        self.manifest: Manifest = read_manifest(folder) if manifest is None else manifest
        allow_open_files()
        self._files = SplitFiles(folder, self.manifest, split, checksums=self.settings.verify != "never", mapped=True)
        self.row_bytes, self.group_rows = self._files.row_bytes, self._files.group_rows
        self._fields = self._files.fields
        self._prefixes = {name: np.frombuffer(value_prefix(*column), np.uint8) for name, column in self._fields.items()}
        self._strides = [value_bytes(*column) for column in self._fields.values()]
        self._gather = make_gather(list(zip(self._strides, self._prefixes.values(), strict=True)))
        self._first_rows = np.cumsum([0, *self.group_rows])
        self.window_rows = self._files.window_rows(self.settings.cache_limit_bytes)
        """None: all rows are shuffled together; else the number of rows of a window (see `epoch_order`)."""
        self._files.use_cache(self.settings.cache_folder, self.settings.cache_limit_bytes)

    def __len__(self) -> int:
        """Return the number of rows of the split."""
        return int(self._first_rows[-1])

    def pool(self, batch_size: int) -> BufferPool:
        """Make memory for batches of one size."""
        columns = {
            name: (len(self._prefixes[name]), stride - len(self._prefixes[name]))
            for name, stride in zip(self._fields, self._strides, strict=True)
        }
        return BufferPool(batch_size, columns, keep=self.settings.batches_in_flight + self.settings.threads + 1)

    def gather(self, rows: NDArray[np.int64], pool: BufferPool | None = None, size: int | None = None) -> Batch:
        """Read the given rows, in this order; the first row pads the batch up to `size`.

        Args:
            rows: Positions of the rows in the split, at least one.
            pool: Memory to use, for batches of `size`.
            size: Number of rows of the batch; by default the number of given rows.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file was truncated, changed or damaged; the message names file, row group, row and sample.
        """
        size = size or len(rows)
        padded = np.concatenate([rows, np.full(size - len(rows), rows[0])])
        memory, values = (pool or self.pool(size)).lend()
        self._read(padded, memory)
        arrays = {name: values[name].view(dtype).reshape(size, *shape) for name, (shape, dtype) in self._fields.items()}
        # A copy, because otherwise a caller that keeps the targets would keep the memory of the images.
        targets = arrays.pop(LABEL_FIELD).view(np.uint8).copy()
        return Batch(arrays, targets, (np.arange(size) < len(rows)).astype(np.float32), padded)

    def advise(self, rows: NDArray[np.int64]) -> None:
        """Ask the operating system to read rows from disk, and fetch row groups that are missing in the cache.

        First some of the rows are probed. If all of these are in memory, nothing is advised, because advice for rows in
        memory costs as much as reading them.
        """
        located = self._locate(rows)
        groups, starts = located.groups_of_rows(), self._starts(located)
        probed = range(0, len(rows), max(1, len(rows) // _PROBED_ROWS))
        if all(_is_in_memory(groups[row].file.descriptor, starts[-1][row]) for row in probed):
            return
        for stride, column in zip(self._strides, starts, strict=True):
            for group, start in zip(groups, column, strict=True):
                os.posix_fadvise(group.file.descriptor, start, stride, os.POSIX_FADV_WILLNEED)

    def ids(self) -> list[str]:
        """Read the ids of all rows, in row order."""
        return self._files.ids()

    def _read(self, rows: NDArray[np.int64], memory: Memory) -> None:
        """Read rows into memory; a row group that is damaged in the cache is fetched again, once."""
        if self._gather is not None:
            located = self._locate(rows)
            if self._gather(
                np.stack([group.entry for group in located.groups]),
                located.group_of,
                located.positions,
                memory.addresses,
                always=self.settings.verify == "always",
            ):
                return
        # Some row is wrong, or was for a moment: this slower way names it.
        fetched_again: set[int] = set()
        while True:
            try:
                self._read_once(rows, memory)
                return
            except DamageError as error:
                if error.place in fetched_again or not self._files.is_cached(error.place):
                    raise
                _log.warning("%s is damaged in the cache (%s): reading it again", error.group.file.path, error)
                fetched_again.add(error.place)
                self._files.fetch(error.place, error.group)

    def _read_once(self, rows: NDArray[np.int64], memory: Memory) -> None:
        located = self._locate(rows)
        places, groups, positions = located.places, located.groups_of_rows(), located.positions.tolist()
        starts = zip(*self._starts(located), strict=True)
        parts = zip(*(memory.rows[name] for name in self._fields), strict=True)
        for row, (group, position, columns, targets) in enumerate(zip(groups, positions, starts, parts, strict=True)):
            try:
                for start, target, stride in zip(columns, targets, self._strides, strict=True):
                    if os.preadv(group.file.descriptor, target, start) != stride:
                        raise self._damage(places[row], group, position, "the file was truncated", REPAIR)
            except OSError as error:  # the error does not name the file
                what = f"{error.strerror} in row group {group.number}"
                raise OSError(error.errno, what, str(group.file.path)) from None
            if (
                group.checksums is not None
                and group.unchecked is not None
                and (self.settings.verify == "always" or group.unchecked[position])
            ):
                # The row is still in the processor's cache here.
                found, stored = row_checksum(value for _, value in targets), int(group.checksums[position])
                if found != stored:
                    what = f"the row's checksum is {found:08x}, stored is {stored:08x}"
                    raise self._damage(places[row], group, position, what, REPAIR_VERIFIED)
                group.unchecked[position] = False
        for name, prefix in self._prefixes.items():
            wrong = (memory.prefixes[name] != prefix).any(axis=1)
            if wrong.any():
                row = int(np.argmax(wrong))
                what = f"column {name!r} does not start as an array of its dtype and shape"
                raise self._damage(places[row], groups[row], positions[row], what, REPAIR_VERIFIED)

    def _damage(self, place: int, group: RowGroup, row: int, what: str, repair: str) -> DamageError:
        sample = self._files.sample_id(place, row)
        named = f"{self._files.where(place)}, row {row} ({f'sample {sample}' if sample else 'its id is unreadable'})"
        return DamageError(place, group, f"{named} is damaged: {what}; {repair}")

    def _starts(self, located: "_Located") -> list[list[int]]:
        """Compute the byte of every row's length prefix, by column."""
        firsts = np.array([group.starts for group in located.groups])[located.group_of]
        return [
            (firsts[:, column] + located.positions * stride).tolist() for column, stride in enumerate(self._strides)
        ]

    def _locate(self, rows: NDArray[np.int64]) -> "_Located":
        """Find every row in its row group, and open these."""
        places = np.searchsorted(self._first_rows, rows, side="right") - 1
        needed, group_of = np.unique(places, return_inverse=True)
        groups = [self._files.row_group(place) for place in needed.tolist()]
        return _Located(places, groups, group_of, rows - self._first_rows[places])


@dataclass(frozen=True)
class _Located:
    """Some rows and their positions."""

    places: NDArray[np.int64]
    """Number of each row's group in reading order, `(rows,)`."""
    groups: list[RowGroup]
    """The open row groups of these rows."""
    group_of: NDArray[np.int64]
    """Index in `groups` of each row's group, `(rows,)`."""
    positions: NDArray[np.int64]
    """Position of each row in its group, `(rows,)`."""

    def groups_of_rows(self) -> list[RowGroup]:
        """Return the row group of every row."""
        return [self.groups[number] for number in self.group_of.tolist()]


def check_readable(
    dataset: Location | Path | str, manifest: Manifest, splits: Iterable[str], settings: ReaderSettings
) -> bool:
    """Refuse on the driver what `SplitReader` would refuse on every rank; nothing is made or cached.

    Returns:
        Whether rows will be read through the cache, because some are remote or compressed.

    Raises:
        FileNotFoundError: A shard is missing.
        ValueError: The split does not exist, a shard differs from the manifest, or the cache holds less than three row
            groups.
    """
    allow_open_files()
    opened = [SplitFiles(Location.at(dataset), manifest, split, checksums=False) for split in splits]
    for files in opened:
        files.window_rows(settings.cache_limit_bytes)
    return any(files.is_cached(place) for files in opened for place in range(len(files.group_rows)))


def window_rows(dataset: Location | Path | str, manifest: Manifest, split: str, settings: ReaderSettings) -> int | None:
    """Return `SplitReader.window_rows` of a split, without opening a reader; errors are those of `check_readable`."""
    return SplitFiles(Location.at(dataset), manifest, split, checksums=False).window_rows(settings.cache_limit_bytes)


def training_batches(
    reader: SplitReader,
    *,
    seed: int,
    epoch: int,
    global_batch_size: int,
    rank: int = 0,
    size: int = 1,
    start_step: int = 0,
    micro_batches: int = 1,
    pool: BufferPool | None = None,
) -> Iterator[Batch]:
    """Yield this rank's part of each global batch of one epoch, from `start_step` on.

    Args:
        reader: The split.
        seed: Seed of the order.
        epoch: Number of the epoch, from 0.
        global_batch_size: Samples per step over all ranks.
        rank: Number of this rank.
        size: Number of ranks.
        start_step: Number of steps to skip at the start of the epoch; their rows are not read.
        micro_batches: Number of batches that make up this rank's part of a step.
        pool: Memory that all epochs reuse.

    Raises:
        ValueError: `size * micro_batches` does not divide `global_batch_size`.
    """
    order = epoch_order(reader.group_rows, seed=seed, epoch=epoch, window_rows=reader.window_rows)
    parts = rank_parts(
        order,
        global_batch_size=global_batch_size,
        rank=rank,
        size=size,
        start_step=start_step,
        micro_batches=micro_batches,
    )
    batch_size = global_batch_size // (size * micro_batches)
    return _prefetched(parts, reader, pool or reader.pool(batch_size), batch_size, size)


def evaluation_batches(reader: SplitReader, *, batch_size: int, rank: int = 0, size: int = 1) -> Iterator[Batch]:
    """Yield this rank's rows; each row is on exactly one rank, and the last batch is padded with weight 0."""
    parts = evaluation_parts(len(reader), batch_size=batch_size, rank=rank, size=size)
    return _prefetched(parts, reader, reader.pool(batch_size), batch_size)


def _prefetched(
    parts: Sequence[NDArray[np.int64]], reader: SplitReader, pool: BufferPool, batch_size: int, ranks: int = 1
) -> Iterator[Batch]:
    """Gather some batches ahead and advise more; the threads end when the consumer does.

    An error is raised when its batch is due, so the failing step does not depend on the threads' speed.
    """
    settings = reader.settings
    advised = _BATCHES_ADVISED
    if reader.window_rows is not None and parts:
        # Fetching beyond the next window would evict row groups that are read soon.
        advised = min(advised, max(0, reader.window_rows // (ranks * len(parts[0])) - settings.batches_in_flight))
    threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="groundswell-reader")
    adviser = ThreadPoolExecutor(1, thread_name_prefix="groundswell-readahead")
    batches: deque[Future[Batch]] = deque()
    try:
        for number in range(len(parts) + settings.batches_in_flight):
            if number < len(parts):
                if advised and number + advised < len(parts):
                    adviser.submit(reader.advise, parts[number + advised])
                batches.append(threads.submit(reader.gather, parts[number], pool, batch_size))
            if number >= settings.batches_in_flight:
                yield batches.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        adviser.shutdown(wait=False, cancel_futures=True)


def _is_in_memory(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not in memory, or the filesystem does not say
        return False
