"""The files of one split, opened in place or read through the cache."""

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.dataset.format.columns import CHECKSUM_FIELD, ID_FIELD
from pipelines.dataset.format.layout import LayoutError, RowGroup, open_row_groups, value_bytes
from pipelines.dataset.format.manifest import Manifest, Shard
from pipelines.dataset.format.rows import Fields, fixed_fields
from pipelines.dataset.read.cache import RowGroupCache
from pipelines.machine.proc import host_memory
from pipelines.storage.folder import Location

REPAIR = "the same `groundswell prepare` command writes this shard again"
"""Remedy for a shard that is missing or has another size, for messages."""
REPAIR_VERIFIED = f"with --set prepare.verify=true {REPAIR}"
"""Remedy for damage that only reading the shard shows."""
_OPENING_THREADS = 16
_MOST_MAPS = 10_000
"""The kernel allows 65,530 maps in a process, and other parts of it need maps too."""


class SplitFiles:
    """The row groups of one split, by their position in reading order."""

    def __init__(
        self, folder: Location, manifest: Manifest, split: str, *, checksums: bool, mapped: bool = False
    ) -> None:
        """Check every shard of the split, and open those whose rows have fixed positions.

        Args:
            folder: Folder of the dataset.
            manifest: The dataset's manifest.
            split: Name of the split.
            checksums: Whether the caller compares the rows' checksums.
            mapped: Whether to copy rows in memory from maps of the files, if `is_mapping_wise` allows it.

        Raises:
            FileNotFoundError: A shard is missing.
            ValueError: The split does not exist, or a shard differs from the manifest; the message names the file.
        """
        if split not in manifest.splits:
            raise ValueError(f"{folder} has no split {split!r}, only {manifest.split_names()}")
        self.folder, self.shards = folder, manifest.splits[split].shards
        self.fields: Fields = fixed_fields(manifest.groups, len(manifest.class_names))
        self.row_bytes = sum(value_bytes(*field) for field in self.fields.values())
        """Bytes of one sample in its file, without the plain columns."""
        self._fingerprint = manifest.fingerprint
        self._checksums = checksums
        self._places = [(shard, group) for shard in self.shards for group in range(len(shard.row_groups))]
        self.group_rows = [shard.row_groups[group] for shard, group in self._places]
        """Number of rows of every row group, in reading order."""
        # In the cache each row group is one file.
        self._mapped = mapped and is_mapping_wise(self.row_bytes * sum(self.group_rows), len(self._places))
        with ThreadPoolExecutor(_OPENING_THREADS) as pool:
            opened = list(pool.map(self._open, self.shards))
        self._opened: list[RowGroup | None] = [group for groups in opened for group in groups]
        self._cache: RowGroupCache | None = None
        self._cached: OrderedDict[int, RowGroup] = OrderedDict()
        self._lock = threading.Lock()

    def _open(self, shard: Shard) -> Sequence[RowGroup | None]:
        size = self.folder.size(shard.file)
        where = f"shard {self.folder / shard.file}"
        if size is None:
            raise FileNotFoundError(f"{where} is missing: {REPAIR}")
        if size != shard.size:
            raise ValueError(f"{where} has {size} bytes, its manifest says {shard.size}: {REPAIR}")
        if not self.folder.is_local:
            return [None] * len(shard.row_groups)
        try:
            groups = open_row_groups(
                self.folder.path / shard.file, self.fields, checksums=self._checksums, mapped=self._mapped
            )
        except LayoutError:
            return [None] * len(shard.row_groups)
        except ValueError as error:
            raise ValueError(f"{error}: {REPAIR_VERIFIED}") from None
        rows = tuple(group.rows for group in groups)
        if rows != shard.row_groups:
            raise ValueError(
                f"{where} has row groups of {rows} rows, its manifest says {shard.row_groups}: {REPAIR_VERIFIED}"
            )
        return groups

    def window_rows(self, cache_limit_bytes: int) -> int | None:
        """Decide among how many rows one is shuffled, so that the row groups in use fit the cache.

        Returns:
            None: All rows are shuffled together; else see `order.epoch_order`.

        Raises:
            ValueError: The cache holds less than three row groups.
        """
        elsewhere = [rows for rows, group in zip(self.group_rows, self._opened, strict=True) if group is None]
        if sum(elsewhere) * self.row_bytes <= cache_limit_bytes:
            return None
        # At a border two windows are read, and prefetching is already in the one after.
        window_rows = cache_limit_bytes // (3 * self.row_bytes)
        if max(elsewhere) > window_rows:
            raise ValueError(
                f"reader.cache_limit_gib={cache_limit_bytes / 2**30:.3g} is less than three row groups of "
                f"{self.folder} ({max(elsewhere) * self.row_bytes / 2**30:.3g} GiB each)"
            )
        return window_rows

    def use_cache(self, folder: Path, limit_bytes: int) -> None:
        """Make the cache if some row group needs it.

        Raises:
            RuntimeError: The cache's folder cannot be made.
        """
        if any(group is None for group in self._opened):
            self._cache = RowGroupCache(folder, limit_bytes, mapped=self._mapped)

    def where(self, place: int) -> str:
        """Return the names of shard and row group, for messages."""
        shard, number = self._places[place]
        return f"shard {self.folder / shard.file}, row group {number}"

    def sample_id(self, place: int, row: int) -> str | None:
        """Read the id of one row of a row group, for messages; None if even the id cannot be read."""
        shard, number = self._places[place]
        try:
            with self.folder.open(shard.file) as file, pq.ParquetFile(file) as parquet:
                return str(parquet.read_row_group(number, columns=[ID_FIELD])[ID_FIELD][row].as_py())
        except (OSError, ValueError, LookupError, RuntimeError):
            return None

    def ids(self) -> list[str]:
        """Read the ids of all rows, in row order."""
        found: list[str] = []
        for shard in self.shards:
            with self.folder.open(shard.file) as file:
                found += pq.read_table(file, columns=[ID_FIELD])[ID_FIELD].to_pylist()
        return found

    def row_group(self, place: int) -> RowGroup:
        """Return an open row group.

        Raises:
            ValueError: The row group cannot be read; the message names shard and row group.
            RuntimeError: The cache's disk is full.
        """
        opened = self._opened[place]
        if opened is not None:
            return opened
        with self._lock:
            if place in self._cached:
                self._cached.move_to_end(place)
                return self._cached[place]
        return self.fetch(place)

    def is_cached(self, place: int) -> bool:
        """Return whether a row group is read through the cache."""
        return self._opened[place] is None

    def fetch(self, place: int, damaged: RowGroup | None = None) -> RowGroup:
        """Return a row group from the cache, where it is written if it is absent or is the damaged one.

        Raises:
            ValueError: The row group cannot be read.
        """
        assert self._cache is not None, "use_cache comes first"
        shard, number = self._places[place]

        def read() -> pa.Table:
            # Always the checksums of the dataset: those of the cache would make a damaged row valid for all others.
            try:
                with self.folder.open(shard.file) as file, pq.ParquetFile(file) as parquet:
                    return parquet.read_row_group(number, columns=[*self.fields, CHECKSUM_FIELD])
            except Exception as error:  # any error of the storage's library
                raise ValueError(str(error)) from error

        key = f"{self._fingerprint} {self.folder} {shard.file} {number}"
        try:
            group = self._cache.get(key, self.fields, read, self.group_rows[place], damaged=damaged)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.where(place)} cannot be read: {error}; {REPAIR_VERIFIED}") from error
        with self._lock:
            self._cached[place] = group
            # The least recently used ones are closed to free their disk space.
            while sum(self.group_rows[open_] for open_ in self._cached) * self.row_bytes > self._cache.limit_bytes:
                self._cached.popitem(last=False)
        return group


def is_mapping_wise(split_bytes: int, files: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether rows may be copied from maps of their files; otherwise they are read.

    Maps are used if all rows of a reader fit half of the memory. Most rows of a larger reader come from disk. The
    kernel's tables of the maps take 2 GiB of memory for each TiB, in every process.

    Args:
        split_bytes: Size of all rows of the reader: those of a split, or of the shards that one task scores.
        files: Largest number of files.
        environment: Environment variables. YARN sets `CONTAINER_ID`; it kills containers with too many mapped pages.
    """
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)  # `spark.executor.pyspark.memory` sets it
    if address_space != resource.RLIM_INFINITY or "CONTAINER_ID" in environment or files > _MOST_MAPS:
        return False
    memory, _ = host_memory()
    return split_bytes <= memory // 2
