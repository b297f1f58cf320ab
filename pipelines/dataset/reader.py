"""Samples of one split, gathered from their places in Parquet into recycled memory, in an order known in advance."""

import os
import resource
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.dataset.buffers import BufferPool, Memory
from pipelines.dataset.cache import DEFAULT_LIMIT_BYTES, RowGroupCache, default_cache_folder
from pipelines.dataset.columns import ID_FIELD, LABEL_FIELD
from pipelines.dataset.layout import Fields, LayoutError, RowGroup, open_row_groups, value_bytes, value_prefix
from pipelines.dataset.manifest import Manifest, Shard, read_manifest
from pipelines.dataset.order import epoch_order, evaluation_parts, rank_parts
from pipelines.dataset.rows import fixed_fields
from pipelines.storage import Folder

OPENING_THREADS = 16
_PROBED_ROWS = 8


@dataclass(frozen=True)
class ReaderSettings:
    """How rows are read; `window_rows` of the order follows from the cache's limit where the split exceeds it."""

    threads: int = 2
    """That gather batches."""
    batches_in_flight: int = 3
    """Gathered or being gathered ahead of the one that is asked for."""
    batches_advised: int = 8
    """Further batches whose rows the operating system is told to read from disk."""
    cache_folder: Path = field(default_factory=default_cache_folder)
    """On a local disk; for row groups that are remote or whose rows have no fixed places."""
    cache_limit_bytes: int = DEFAULT_LIMIT_BYTES


@dataclass(frozen=True)
class Batch:
    """Samples side by side; `weights` is 0 where a row only pads the last batch of an evaluation."""

    images: dict[str, NDArray[np.generic]]
    """By image group, `(batch, height, width, bands)` in the stored dtype."""
    targets: NDArray[np.uint8]
    """Multi-hot, `(batch, classes)`."""
    weights: NDArray[np.float32]
    """`(batch,)`, 1 or 0."""
    rows: NDArray[np.int64]
    """`(batch,)`, position of each sample in the split: with `SplitReader.ids`, its id."""


class SplitReader:
    """Random access to the rows of one split."""

    def __init__(self, dataset: Folder | Path | str, split: str, settings: ReaderSettings | None = None) -> None:
        """Open every local shard of the split and check its layout.

        Raises:
            FileNotFoundError: No such dataset, or a shard is missing.
            ValueError: No such split, or a shard is not what the manifest says; names the file.
            RuntimeError: No folder for the cache, where one is needed.
        """
        self.settings = settings or ReaderSettings()
        self._folder = Folder.at(dataset)
        self.manifest: Manifest = read_manifest(self._folder)
        if split not in self.manifest.splits:
            raise ValueError(f"{dataset} has no split {split!r}, only {', '.join(sorted(self.manifest.splits))}")
        self._shards = self.manifest.splits[split].shards
        self._fields: Fields = fixed_fields(self.manifest.groups, len(self.manifest.class_names))
        self._prefixes = {name: np.frombuffer(value_prefix(*column), np.uint8) for name, column in self._fields.items()}
        self._strides = [value_bytes(*column) for column in self._fields.values()]
        self.row_bytes = sum(self._strides)
        """Of one sample in its file, without its id."""
        self._places = [(shard, group) for shard in self._shards for group in range(len(shard.row_groups))]
        self.group_rows = [shard.row_groups[group] for shard, group in self._places]
        """Rows of every row group, in reading order."""
        self._first_rows = np.cumsum([0, *self.group_rows])
        _allow_open_files()
        with ThreadPoolExecutor(OPENING_THREADS) as pool:
            opened = list(pool.map(self._open, self._shards))
        self._row_groups: list[RowGroup | None] = [group for groups in opened for group in groups]
        self._cached: OrderedDict[int, RowGroup] = OrderedDict()
        self._lock = threading.Lock()
        self._cache: RowGroupCache | None = None
        self.window_rows = self._prepare_cache()
        """None: a true shuffle of all rows; else rows among which one is shuffled (see `epoch_order`)."""

    def __len__(self) -> int:
        """Rows of the split."""
        return int(self._first_rows[-1])

    def pool(self, batch_size: int) -> BufferPool:
        """Memory for batches of one size."""
        columns = {
            name: (len(self._prefixes[name]), stride - len(self._prefixes[name]))
            for name, stride in zip(self._fields, self._strides, strict=True)
        }
        return BufferPool(batch_size, columns, keep=self.settings.batches_in_flight + self.settings.threads + 1)

    def gather(self, rows: NDArray[np.int64], pool: BufferPool | None = None, size: int | None = None) -> Batch:
        """Read the given rows, in this order; padded with its first row up to `size`.

        Args:
            rows: At least one.
            pool: Whose memory is used; it must be for batches of `size`.
            size: By default as many as there are rows.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file was truncated or changed; names file and row group.
        """
        size = size or len(rows)
        padded = np.concatenate([rows, np.full(size - len(rows), rows[0])])
        memory, values = (pool or self.pool(size)).lend()
        self._read(padded, memory)
        arrays = {name: values[name].view(dtype).reshape(size, *shape) for name, (shape, dtype) in self._fields.items()}
        # A copy: who keeps the targets shall not keep the images.
        targets = arrays.pop(LABEL_FIELD).view(np.uint8).copy()
        return Batch(arrays, targets, (np.arange(size) < len(rows)).astype(np.float32), padded)

    def advise(self, rows: NDArray[np.int64]) -> None:
        """Tell the operating system to read rows from disk, and fetch row groups that are not in the cache.

        Rows that are in memory already are left alone: some of them are asked for, as all would cost as much as
        reading them.
        """
        places, groups = self._row_groups_of(rows)
        descriptors = [group.file.descriptor for group in groups]
        positions = rows - self._first_rows[places]
        starts = [
            (np.array([group.starts[column] for group in groups]) + positions * stride).tolist()
            for column, stride in enumerate(self._strides)
        ]
        probed = range(0, len(rows), max(1, len(rows) // _PROBED_ROWS))
        if all(_is_in_memory(descriptors[row], starts[-1][row]) for row in probed):
            return
        for stride, column in zip(self._strides, starts, strict=True):
            for descriptor, start in zip(descriptors, column, strict=True):
                os.posix_fadvise(descriptor, start, stride, os.POSIX_FADV_WILLNEED)

    def ids(self) -> list[str]:
        """Ids of all rows, in row order; reads that column of every shard."""
        found: list[str] = []
        for shard in self._shards:
            with self._folder.open(shard.file) as file:
                found += pq.read_table(file, columns=[ID_FIELD])[ID_FIELD].to_pylist()
        return found

    def _open(self, shard: Shard) -> Sequence[RowGroup | None]:
        size = self._folder.size(shard.file)
        where = f"shard {self._folder / shard.file}"
        if size is None:
            raise FileNotFoundError(f"{where} is missing: prepare the dataset again")
        if size != shard.size:
            raise ValueError(f"{where} has {size} bytes, its manifest says {shard.size}")
        if not self._folder.is_local:
            return [None] * len(shard.row_groups)
        try:
            groups = open_row_groups(self._folder.path / shard.file, self._fields)
        except LayoutError:
            return [None] * len(shard.row_groups)
        rows = tuple(group.rows for group in groups)
        if rows != shard.row_groups:
            raise ValueError(f"{where} has row groups of {rows} rows, its manifest says {shard.row_groups}")
        return groups

    def _prepare_cache(self) -> int | None:
        elsewhere = [rows for rows, group in zip(self.group_rows, self._row_groups, strict=True) if group is None]
        if not elsewhere:
            return None
        limit = self.settings.cache_limit_bytes
        self._cache = RowGroupCache(self.settings.cache_folder, limit)
        # At a border between windows the rows of two are asked for, and prefetching is at the next one's.
        if sum(elsewhere) * self.row_bytes <= limit:
            return None
        window_rows = limit // (3 * self.row_bytes)
        if max(elsewhere) > window_rows:
            raise ValueError(
                f"reader.cache_limit_gib={limit / 2**30:.3g} is less than three row groups of {self._folder} "
                f"({max(elsewhere) * self.row_bytes / 2**30:.3g} GiB each)"
            )
        return window_rows

    def _read(self, rows: NDArray[np.int64], memory: Memory) -> None:
        places, groups = self._row_groups_of(rows)
        descriptors = [group.file.descriptor for group in groups]
        positions = rows - self._first_rows[places]
        for column, (name, stride) in enumerate(zip(self._fields, self._strides, strict=True)):
            starts = (np.array([group.starts[column] for group in groups]) + positions * stride).tolist()
            for row, (descriptor, start, parts) in enumerate(zip(descriptors, starts, memory.rows[name], strict=True)):
                if os.preadv(descriptor, parts, start) != stride:
                    raise ValueError(f"shard {groups[row]} was truncated while it was read: prepare the dataset again")
            wrong = (memory.prefixes[name] != self._prefixes[name]).any(axis=1)
            if wrong.any():
                row = int(np.argmax(wrong))
                raise ValueError(
                    f"shard {groups[row]} was damaged or changed: column {name!r} at row {positions[row]} of the row "
                    "group does not start as an array of its dtype and shape"
                )

    def _row_groups_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[RowGroup]]:
        """Position and open row group of every row."""
        places = np.searchsorted(self._first_rows, rows, side="right") - 1
        needed, inverse = np.unique(places, return_inverse=True)
        groups = [self._row_groups[place] or self._fetch(place) for place in needed.tolist()]
        return places, [groups[number] for number in inverse.tolist()]

    def _fetch(self, place: int) -> RowGroup:
        """A row group from the cache; the least recently used ones are closed, so that their disk space is freed."""
        assert self._cache is not None
        with self._lock:
            if place in self._cached:
                self._cached.move_to_end(place)
                return self._cached[place]
        shard, number = self._places[place]

        where = f"shard {self._folder / shard.file}, row group {number}"

        def read() -> pa.Table:
            try:
                with self._folder.open(shard.file) as file, pq.ParquetFile(file) as parquet:
                    return parquet.read_row_group(number, columns=list(self._fields))
            except Exception as error:  # whatever the storage's library raises
                raise ValueError(f"{where} cannot be read: {error}") from error

        key = f"{self.manifest.fingerprint} {self._folder} {shard.file} {number}"
        try:
            group = self._cache.get(key, self._fields, read, self.group_rows[place])
        except (OSError, ValueError) as error:
            if str(error).startswith(where):
                raise
            raise ValueError(f"{where} cannot be read: {error}") from error
        with self._lock:
            self._cached[place] = group
            while sum(self.group_rows[open_] for open_ in self._cached) * self.row_bytes > self._cache.limit_bytes:
                self._cached.popitem(last=False)
        return group


def training_batches(
    reader: SplitReader,
    *,
    seed: int,
    epoch: int,
    global_batch_size: int,
    rank: int = 0,
    size: int = 1,
    start_step: int = 0,
    pool: BufferPool | None = None,
) -> Iterator[Batch]:
    """Yield this rank's part of each global batch of one epoch, from `start_step` on.

    Args:
        reader: The split.
        seed: Of the order.
        epoch: From 0.
        global_batch_size: Samples per step over all ranks.
        rank: This one.
        size: All ranks.
        start_step: Steps of the epoch to leave out; they are not read.
        pool: Memory to go on with from epoch to epoch.

    Raises:
        ValueError: `size` does not divide `global_batch_size`.
    """
    order = epoch_order(reader.group_rows, seed=seed, epoch=epoch, window_rows=reader.window_rows)
    parts = rank_parts(order, global_batch_size=global_batch_size, rank=rank, size=size, start_step=start_step)
    return _prefetched(parts, reader, pool or reader.pool(global_batch_size // size), global_batch_size // size, size)


def evaluation_batches(reader: SplitReader, *, batch_size: int, rank: int = 0, size: int = 1) -> Iterator[Batch]:
    """Yield this rank's rows, each row of the split on exactly one rank; the last batch is padded with weight 0."""
    parts = evaluation_parts(len(reader), batch_size=batch_size, rank=rank, size=size)
    return _prefetched(parts, reader, reader.pool(batch_size), batch_size)


def _prefetched(
    parts: Sequence[NDArray[np.int64]], reader: SplitReader, pool: BufferPool, batch_size: int, ranks: int = 1
) -> Iterator[Batch]:
    """Gather some batches ahead, advise more; the threads end when the consumer does."""
    settings = reader.settings
    advised = settings.batches_advised
    if reader.window_rows is not None and parts:
        # What is fetched beyond the next window would push out what is about to be read.
        advised = min(advised, max(0, reader.window_rows // (ranks * len(parts[0])) - settings.batches_in_flight))
    threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="groundswell-reader")
    adviser = ThreadPoolExecutor(1, thread_name_prefix="groundswell-readahead")
    batches: deque[Future[Batch]] = deque()
    try:
        for number in range(len(parts) + settings.batches_in_flight):
            if number < len(parts):
                ahead = number + advised
                if advised and ahead < len(parts):
                    adviser.submit(reader.advise, parts[ahead])
                batches.append(threads.submit(reader.gather, parts[number], pool, batch_size))
            if number >= settings.batches_in_flight:
                yield batches.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        adviser.shutdown(wait=False, cancel_futures=True)


def _is_in_memory(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not there yet, or a filesystem that cannot tell
        return False


def _allow_open_files() -> None:
    """Raise this process's own limit as far as it may: 1024 is fewer than a large dataset has files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
