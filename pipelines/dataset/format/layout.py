"""The position of each row in a Parquet file: rows are read by position, and nothing is decoded.

A column chunk of required binary values of one width, as one uncompressed plain data page, takes
`rows * (4 + width)` bytes. Each value follows its length in 4 little-endian bytes. The column of checksums takes
`rows * 4` bytes. Our writer makes such files. Other files may differ, so the layout is checked when a file is opened.
The start of each value is checked again when a row is read.
"""

import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.dataset.format.columns import CHECKSUM_FIELD
from pipelines.dataset.format.rows import Fields, array_header
from pipelines.dataset.gather import address, map_file, unmap

PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": False,
    "data_page_size": 1 << 30,
}
"""Options of `pyarrow.parquet.ParquetWriter` that make every column chunk one plain page."""

LENGTH_BYTES = 4
"""Bytes of the length before each value in a Parquet file; Arrow's own values have none."""
_CHECKSUM_BYTES = 4
_MAXIMUM_PAGE_HEADER_BYTES = 1024


class LayoutError(ValueError):
    """A readable Parquet file whose rows have no fixed positions: compressed, in several pages, or of other widths."""


class OpenFile:
    """A file descriptor that is closed when its last reference goes.

    With `mapped`, rows in the page cache are copied from a map of the file, see `pipelines.dataset.gather`.
    """

    def __init__(self, path: Path, *, mapped: bool) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.size = os.fstat(self.descriptor).st_size
        self.mapping = map_file(self.descriptor, self.size) if mapped else 0
        """Address of the map; 0 without a map."""
        if self.mapping:
            # Not when Python exits: a daemon thread may still be reading, and the end of the process removes the map.
            weakref.finalize(self, unmap, self.mapping, self.size).atexit = False


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one row group: row i of a column starts at `starts[column] + i * strides[column]`."""

    file: OpenFile
    number: int
    """Position in its file."""
    rows: int
    starts: tuple[int, ...]
    """Byte of the first row's length prefix, by column in the order of the fields."""
    checksums: NDArray[np.uint32] | None = field(default=None, compare=False)
    """Stored checksums, `(rows,)`; None where the caller did not ask for them."""
    unchecked: NDArray[np.bool_] | None = field(default=None, compare=False)
    """Whether a row has not been read since the file was opened, `(rows,)`; None without the checksums."""
    entry: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """Input of `pipelines.dataset.gather`, `(4 + columns,)`: descriptor, addresses of map and both arrays, starts.

    An address is 0 where there is no map or array.
    """

    def __post_init__(self) -> None:
        """Build the entry."""
        arrays = [0 if array is None else address(array) for array in (self.checksums, self.unchecked)]
        numbers = [self.file.descriptor, self.file.mapping, *arrays, *self.starts]
        object.__setattr__(self, "entry", np.array(numbers, np.int64))


def value_prefix(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """Return the bytes with which every value of a column starts: its length, and the header of its array."""
    header = array_header(shape, dtype)
    width = len(header) + int(np.prod(shape)) * dtype.itemsize
    return width.to_bytes(LENGTH_BYTES, "little") + header


def value_bytes(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """Return the bytes of one value with its prefix: the distance from row to row."""
    return len(value_prefix(shape, dtype)) + int(np.prod(shape)) * dtype.itemsize


def open_row_groups(path: Path, fields: Fields, *, checksums: bool, mapped: bool = False) -> list[RowGroup]:
    """Open a Parquet file and find its rows.

    Args:
        path: The file.
        fields: Columns of fixed width.
        checksums: Whether to read the column of checksums, which the file must then have.
        mapped: Whether to map the file, for rows that are already in memory.

    Raises:
        OSError: The file cannot be opened.
        LayoutError: Its rows have no fixed positions; any other reader can still read it.
        ValueError: It is not Parquet, or lacks a column. The message names the file.
    """
    file = OpenFile(path, mapped=mapped)
    try:
        metadata = pq.read_metadata(path)
    except (OSError, ValueError) as error:  # pyarrow does not name the path
        raise ValueError(f"shard {path} is not Parquet: {error}") from None
    groups = []
    for number in range(metadata.num_row_groups):
        row_group = metadata.row_group(number)
        where = f"shard {path}, row group {number}"
        chunks = {row_group.column(i).path_in_schema: row_group.column(i) for i in range(row_group.num_columns)}
        missing = [name for name in (*fields, *[CHECKSUM_FIELD] * checksums) if name not in chunks]
        if missing:
            raise ValueError(f"{where}: no column {missing[0]!r}")
        starts = tuple(
            _start(chunks[name], row_group.num_rows, value_bytes(*column), file.size, where)
            for name, column in fields.items()
        )
        stored = _stored_checksums(file, chunks[CHECKSUM_FIELD], row_group.num_rows, where) if checksums else None
        unchecked = np.ones(row_group.num_rows, bool) if checksums else None
        groups.append(RowGroup(file, number, row_group.num_rows, starts, stored, unchecked))
        _check_first_row(groups[-1], fields, where)
    return groups


def _start(chunk: pq.ColumnChunkMetaData, rows: int, stride: int, size: int, where: str) -> int:
    page_header = chunk.total_uncompressed_size - rows * stride
    start: int = chunk.data_page_offset + page_header
    if (
        chunk.compression != "UNCOMPRESSED"
        or chunk.dictionary_page_offset is not None
        or "PLAIN" not in chunk.encodings
        or not 0 < page_header < _MAXIMUM_PAGE_HEADER_BYTES
        or start + rows * stride > size
    ):
        raise LayoutError(f"{where}: column {chunk.path_in_schema!r} is not one plain page of {stride}-byte values")
    return start


def _stored_checksums(file: OpenFile, chunk: pq.ColumnChunkMetaData, rows: int, where: str) -> NDArray[np.uint32]:
    if chunk.physical_type != "INT32":
        raise LayoutError(f"{where}: column {CHECKSUM_FIELD!r} is {chunk.physical_type}, not INT32")
    start = _start(chunk, rows, _CHECKSUM_BYTES, file.size, where)
    stored = os.pread(file.descriptor, rows * _CHECKSUM_BYTES, start)
    if len(stored) != rows * _CHECKSUM_BYTES:
        raise LayoutError(f"{where}: column {CHECKSUM_FIELD!r} ends early: the file was cut short")
    return np.frombuffer(stored, np.dtype("<u4"))


def _check_first_row(group: RowGroup, fields: Fields, where: str) -> None:
    for (name, column), start in zip(fields.items(), group.starts, strict=True):
        prefix = value_prefix(*column)
        if os.pread(group.file.descriptor, len(prefix), start) != prefix:
            raise LayoutError(f"{where}: column {name!r} does not hold {column[1]} arrays of shape {column[0]}")
