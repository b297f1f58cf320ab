"""A local cache, shared by all ranks of a host, for row groups without fixed row positions.

There is one file per row group, in our writer's layout and with a checksum per row. One process writes while the
others wait, under a lock that the kernel releases. A rename publishes the file atomically: a rank that dies while it
writes leaves nothing that others read.
"""

import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.dataset.format.columns import CHECKSUM_FIELD
from pipelines.dataset.format.encoding import encoded, stored_checksums
from pipelines.dataset.format.layout import PARQUET_OPTIONS, RowGroup, open_row_groups, value_bytes
from pipelines.dataset.format.rows import Fields
from pipelines.storage.whole_files import is_open_at, new_file

_LOCKS = 64
# The folder may hold files of its user: only files with these names are read and removed.
_ENTRY = re.compile(r"[0-9a-f]{64}\.parquet")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.parquet\.[0-9a-f]{32}")


def default_cache_folder() -> Path:
    """Return `groundswell-cache-<user id>` in the host's temporary folder, which outlives a worker's own folder."""
    host = os.environ.get("GROUNDSWELL_HOST_TMPDIR") or tempfile.gettempdir()
    return Path(host, f"groundswell-cache-{os.getuid()}")


class RowGroupCache:
    """Files by key; the least recently used ones are removed if the next file would exceed the limit."""

    def __init__(self, folder: Path, limit_bytes: int, *, mapped: bool = False) -> None:
        """Make the folder, for this user only.

        Raises:
            RuntimeError: The folder cannot be made, or belongs to another user.
        """
        self.folder, self.limit_bytes, self._mapped = folder, limit_bytes, mapped
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / "locks").mkdir(exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"no cache folder at {folder} ({error.strerror}): set reader.cache_folder") from None
        # Somebody else's link to a folder of this user would choose the location of the cache.
        if folder.stat().st_uid != os.getuid() or folder.lstat().st_uid not in (os.getuid(), 0):
            raise RuntimeError(f"the cache folder {folder} belongs to another user: set reader.cache_folder")

    def get(
        self,
        key: str,
        fields: Fields,
        read: Callable[[], pa.Table],
        rows: int,
        *,
        damaged: RowGroup | None = None,
    ) -> RowGroup:
        """Open the row group of a key; if it is missing or damaged, read and rewrite it first.

        Args:
            key: Identifier of the content: another dataset or file has another key.
            fields: Columns of fixed width.
            read: Function that returns the row group's encoded columns, as they are in the source, with its checksums.
            rows: Number of rows that the row group must have.
            damaged: Result of an earlier call that proved to be damaged. It is removed, unless another process has
                replaced it already.

        Raises:
            RuntimeError: The disk is full.
            ValueError: The source does not contain what the fields describe.
        """
        name = hashlib.sha256(key.encode()).hexdigest()
        path = self.folder / f"{name}.parquet"
        with self._lock(int(name[:8], 16) % _LOCKS):
            if damaged is not None and is_open_at(damaged.file.descriptor, path):
                path.unlink(missing_ok=True)
            if path.is_file():
                try:
                    return self._opened(path, fields, rows)
                except (ValueError, FileNotFoundError):  # damaged, or just removed to make room
                    path.unlink(missing_ok=True)
            source = read()
            table = encoded(source, fields).append_column(
                pa.field(CHECKSUM_FIELD, pa.uint32(), nullable=False), pa.array(stored_checksums(source))
            )
            with self._lock(_LOCKS):  # only one process writes, or two would take the same room
                self._make_room(rows * sum(value_bytes(*field) for field in fields.values()))
                try:
                    with new_file(path, flush=False) as partial:
                        pq.write_table(table, partial, row_group_size=max(1, len(table)), **PARQUET_OPTIONS)
                except OSError as error:
                    raise RuntimeError(
                        f"cannot write {self.folder} ({error}): set reader.cache_folder to a larger disk, or lower "
                        "reader.cache_limit_gib"
                    ) from None
            return self._opened(path, fields, rows)

    def _opened(self, path: Path, fields: Fields, rows: int) -> RowGroup:
        groups = open_row_groups(path, fields, checksums=True, mapped=self._mapped)
        if [group.rows for group in groups] != [rows]:
            raise ValueError(f"{path} has {[group.rows for group in groups]} rows, not {rows}")
        with suppress(FileNotFoundError):  # another process makes room: the open file stays readable
            os.utime(path)
        return groups[0]

    def _make_room(self, size: int) -> None:
        entries = []
        for path in self.folder.iterdir():
            if _ENTRY.fullmatch(path.name):
                with suppress(FileNotFoundError):  # a damaged file that another process removed
                    status = path.stat()
                    entries.append((status.st_mtime_ns, status.st_size, path))
            elif _UNFINISHED.fullmatch(path.name):  # its process died while it wrote: only one writes at a time
                path.unlink(missing_ok=True)
        excess = sum(entry[1] for entry in entries) + size - self.limit_bytes
        for _, freed, path in sorted(entries):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= freed

    @contextmanager
    def _lock(self, number: int) -> Iterator[None]:
        with (self.folder / "locks" / str(number)).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
