"""The files of one split: opened where they lie, or read through the cache."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.dataset.format.columns import CHECKSUM_FIELD, ID_FIELD
from pipelines.dataset.format.layout import LayoutError, RowGroup, open_row_groups, value_bytes
from pipelines.dataset.format.manifest import Manifest, Shard
from pipelines.dataset.format.rows import Fields, fixed_fields
from pipelines.dataset.read.cache import RowGroupCache
from pipelines.dataset.read.mapping import is_wise
from pipelines.storage.folder import Folder

REPAIR = "the same `groundswell prepare` command writes this shard again"
"""What to do about a shard that is missing or has another size, for messages."""
REPAIR_VERIFIED = f"with --set prepare.verify=true {REPAIR}"
"""What to do about damage that only reading the shard shows."""
_OPENING_THREADS = 16


class SplitFiles:
    """The row groups of one split, by their place in reading order."""

    def __init__(
        self, folder: Folder, manifest: Manifest, split: str, *, checksums: bool, mapped: bool = False
    ) -> None:
        """Look at every shard of the split, and open those whose rows have fixed places.

        Args:
            folder: The dataset.
            manifest: Its manifest.
            split: Name of the split.
            checksums: Whether the caller compares the rows' checksums.
            mapped: Whether rows that are in memory are copied from maps of the files, where `mapping.is_wise` says so.

        Raises:
            FileNotFoundError: A shard is missing.
            ValueError: No such split, or a shard is not what the manifest says; names the file.
        """
        if split not in manifest.splits:
            raise ValueError(f"{folder} has no split {split!r}, only {manifest.split_names()}")
        self.folder, self.shards = folder, manifest.splits[split].shards
        self.fields: Fields = fixed_fields(manifest.groups, len(manifest.class_names))
        self.row_bytes = sum(value_bytes(*field) for field in self.fields.values())
        """Bytes of one sample in its file, without its plain columns."""
        self._fingerprint = manifest.fingerprint
        self._checksums = checksums
        self._places = [(shard, group) for shard in self.shards for group in range(len(shard.row_groups))]
        self.group_rows = [shard.row_groups[group] for shard, group in self._places]
        """Rows of every row group, in reading order."""
        # In the cache each row group is a file.
        self._mapped = mapped and is_wise(self.row_bytes * sum(self.group_rows), len(self._places))
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
            None: A true shuffle of all rows; else see `order.epoch_order`.

        Raises:
            ValueError: The cache is smaller than three row groups.
        """
        elsewhere = [rows for rows, group in zip(self.group_rows, self._opened, strict=True) if group is None]
        if sum(elsewhere) * self.row_bytes <= cache_limit_bytes:
            return None
        # At a border between windows the rows of two are asked for, and prefetching is at the next one's.
        window_rows = cache_limit_bytes // (3 * self.row_bytes)
        if max(elsewhere) > window_rows:
            raise ValueError(
                f"reader.cache_limit_gib={cache_limit_bytes / 2**30:.3g} is less than three row groups of "
                f"{self.folder} ({max(elsewhere) * self.row_bytes / 2**30:.3g} GiB each)"
            )
        return window_rows

    def use_cache(self, folder: Path, limit_bytes: int) -> None:
        """Make the cache, where some row group needs it.

        Raises:
            RuntimeError: Its folder cannot be made.
        """
        if any(group is None for group in self._opened):
            self._cache = RowGroupCache(folder, limit_bytes, mapped=self._mapped)

    def where(self, place: int) -> str:
        """Name shard and row group, for messages."""
        shard, number = self._places[place]
        return f"shard {self.folder / shard.file}, row group {number}"

    def sample_id(self, place: int, row: int) -> str | None:
        """Read the id of one row of a row group, for messages; None where even that cannot be read."""
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
        """Give an open row group.

        Raises:
            ValueError: It cannot be read; names shard and row group.
            RuntimeError: The cache's disk is full.
        """
        opened = self._opened[place]
        if opened is not None:
            return opened
        with self._lock:
            if place in self._cached:
                self._cached.move_to_end(place)
                return self._cached[place]
        return self._fetch(place, None)

    def is_cached(self, place: int) -> bool:
        """Whether a row group is read through the cache."""
        return self._opened[place] is None

    def replace(self, place: int, damaged: RowGroup) -> None:
        """Drop a damaged row group from the cache and read it from the dataset again.

        Raises:
            ValueError, RuntimeError: As `row_group`.
        """
        self._fetch(place, damaged)

    def _fetch(self, place: int, damaged: RowGroup | None) -> RowGroup:
        assert self._cache is not None, "use_cache comes first"
        shard, number = self._places[place]
        where = self.where(place)

        def read() -> pa.Table:
            # Those of the dataset whoever reads: the cache's own would make a damaged row a whole one for all others.
            columns = [*self.fields, CHECKSUM_FIELD]
            try:
                with self.folder.open(shard.file) as file, pq.ParquetFile(file) as parquet:
                    table = parquet.read_row_group(number, columns=columns)
            except Exception as error:  # whatever the storage's library raises
                raise ValueError(f"{where} cannot be read: {error}; {REPAIR_VERIFIED}") from error
            missing = [name for name in columns if name not in table.column_names]
            if missing:
                raise ValueError(f"{where}: no column {missing[0]!r}")
            return table

        key = f"{self._fingerprint} {self.folder} {shard.file} {number}"
        try:
            group = self._cache.get(key, self.fields, read, self.group_rows[place], damaged=damaged)
        except (OSError, ValueError) as error:
            if str(error).startswith(where):
                raise
            raise ValueError(f"{where} cannot be read: {error}; {REPAIR_VERIFIED}") from error
        with self._lock:
            self._cached[place] = group
            # The least recently used ones are closed, so that their disk space is freed.
            while sum(self.group_rows[open_] for open_ in self._cached) * self.row_bytes > self._cache.limit_bytes:
                self._cached.popitem(last=False)
        return group
