"""Row groups without fixed places, rewritten once into a local folder that all ranks of a host share.

One file a row group, in the layout of our own writer. A lock that the kernel releases makes one process write and the
others wait, and a rename makes the file appear whole: a rank that dies while writing leaves nothing that is believed.
"""

import fcntl
import hashlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.dataset.layout import (
    PARQUET_OPTIONS,
    Fields,
    RowGroup,
    open_row_groups,
    value_bytes,
    value_prefix,
)
from pipelines.dataset.rows import ColumnBuffer

DEFAULT_LIMIT_BYTES = 100 << 30
_LOCKS = 64


def default_cache_folder() -> Path:
    """`groundswell-cache-<user id>` in the host's temporary folder, which outlives a worker's own."""
    host = os.environ.get("GROUNDSWELL_HOST_TMPDIR") or tempfile.gettempdir()
    return Path(host, f"groundswell-cache-{os.getuid()}")


class RowGroupCache:
    """Files by key, the least recently used removed where the next one would exceed the limit."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Make the folder, for this user only.

        Raises:
            RuntimeError: It cannot be made, or belongs to another user.
        """
        self.folder, self.limit_bytes = folder, limit_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / "locks").mkdir(exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"no cache folder at {folder} ({error.strerror}): set reader.cache_folder") from None
        if folder.stat().st_uid != os.getuid():
            raise RuntimeError(f"the cache folder {folder} belongs to another user: set reader.cache_folder")

    def get(self, key: str, fields: Fields, read: Callable[[], pa.Table], rows: int) -> RowGroup:
        """Open the row group of a key, rewritten first where it is not there.

        Args:
            key: Names the content: another dataset or file has another key.
            fields: Columns of fixed width.
            read: Gives the row group's columns, encoded, as they are in the source.
            rows: Rows that it must have.

        Raises:
            RuntimeError: The disk is full.
            ValueError: The source does not hold what the fields say.
        """
        name = hashlib.sha256(key.encode()).hexdigest()
        path = self.folder / f"{name}.parquet"
        with self._lock(int(name[:8], 16) % _LOCKS):
            if path.is_file():
                try:
                    return self._opened(path, fields, rows)
                except (ValueError, FileNotFoundError):  # damaged, or removed a moment ago to make room
                    path.unlink(missing_ok=True)
            table = encoded(read(), fields)
            with self._lock(_LOCKS):  # one writes at a time, or two would take the same room
                self._make_room(rows * sum(value_bytes(*field) for field in fields.values()))
                self._write(table, path)
            return self._opened(path, fields, rows)

    def _opened(self, path: Path, fields: Fields, rows: int) -> RowGroup:
        groups = open_row_groups(path, fields)
        if [group.rows for group in groups] != [rows]:
            raise ValueError(f"{path} has {[group.rows for group in groups]} rows, not {rows}")
        with suppress(FileNotFoundError):  # another process makes room: the open file stays readable
            os.utime(path)
        return groups[0]

    def _write(self, table: pa.Table, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            pq.write_table(table, temporary, row_group_size=max(1, len(table)), **PARQUET_OPTIONS)
            temporary.replace(path)
        except OSError as error:
            raise RuntimeError(
                f"cannot write {self.folder} ({error}): set reader.cache_folder to a larger disk, or lower "
                "reader.cache_limit_gib"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        entries = []
        for path in self.folder.iterdir():
            if path.suffix == ".parquet":
                with suppress(FileNotFoundError):  # a damaged one, removed by another process
                    status = path.stat()
                    entries.append((status.st_mtime_ns, status.st_size, path))
            elif path.name.startswith("."):  # of a process that died while it wrote: only one writes at a time
                path.unlink()
        excess = sum(entry[1] for entry in entries) + size - self.limit_bytes
        for _, freed, path in sorted(entries):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= freed

    @contextmanager
    def _lock(self, number: int) -> Iterator[None]:
        with (self.folder / "locks" / str(number)).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def encoded(table: pa.Table, fields: Fields) -> pa.Table:
    """The columns of fixed width, required, every value as our writer encodes it.

    Raises:
        ValueError: A value is missing, no array, or of another shape or dtype; names column and row.
    """
    missing = [name for name in fields if name not in table.column_names]
    if missing:
        raise ValueError(f"no column {missing[0]!r}, only {', '.join(table.column_names)}")
    columns = {name: _column(table[name].combine_chunks(), name, *field) for name, field in fields.items()}
    schema = pa.schema([pa.field(name, pa.binary(), nullable=False) for name in fields])
    return pa.table(list(columns.values()), schema=schema)


def _column(values: pa.Array, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):  # of no chunk at all
        values = pa.concat_arrays([pa.array([], pa.binary()), *values.chunks])
    if not pa.types.is_binary(values.type):
        raise ValueError(f"column {name!r} is {values.type}, expected binary arrays")
    if values.null_count:
        raise ValueError(f"column {name!r} has {values.null_count} missing values")
    if _is_encoded(values, shape, dtype):
        return values
    buffer = ColumnBuffer(shape, dtype, len(values))
    for row, value in enumerate(values):
        try:
            array = np.load(pa.BufferReader(value.as_buffer()), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"column {name!r} holds no array at row {row}: {error}") from None
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"column {name!r} holds {array.dtype} {array.shape} at row {row}, expected {dtype} {shape}"
            )
        buffer.row(row)[:] = array
    return buffer.arrow(len(values))


def _is_encoded(values: pa.Array, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bool:
    """Whether every value is what `ColumnBuffer` would write: then it is taken as it is."""
    prefix = np.frombuffer(value_prefix(shape, dtype)[4:], np.uint8)
    width = value_bytes(shape, dtype) - 4
    offsets: NDArray[np.int32] = np.frombuffer(values.buffers()[1], np.int32)[
        values.offset : values.offset + len(values) + 1
    ]
    if len(values) == 0:
        return True
    if (np.diff(offsets) != width).any():
        return False
    data = np.frombuffer(values.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].reshape(len(values), width)
    return bool((data[:, : len(prefix)] == prefix).all())
