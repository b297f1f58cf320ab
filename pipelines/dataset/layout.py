"""Where the rows of a Parquet file are, so that one is read by its place and nothing is decoded.

A column chunk that is one uncompressed plain data page of required binary values of one width takes
`rows * (4 + width)` bytes, each value behind its little-endian 4-byte length. Our writer makes such files; of others'
none of this is assumed: it is checked when a file is opened, and again for every row that is read.
"""

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pipelines.dataset.rows import array_header

PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": False,
    "data_page_size": 1 << 30,
}
"""Of `pyarrow.parquet.ParquetWriter`: these make every column chunk one plain page."""

_LENGTH_BYTES = 4
_MAXIMUM_PAGE_HEADER_BYTES = 1024

Fields = Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]
"""Shape and dtype of every column of fixed width."""


class LayoutError(ValueError):
    """A readable Parquet file whose rows have no fixed places: compressed, in several pages, of other widths."""


class OpenFile:
    """A file descriptor that is closed with the last reference to it.

    Rows are read from it (`pread`) and not from a memory map: a file that shrinks under a map kills the process
    (SIGBUS), here it is a short read. Both run at the same speed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one row group: row i of a column starts at `starts[column] + i * strides[column]`."""

    file: OpenFile
    number: int
    """Position in its file."""
    rows: int
    starts: tuple[int, ...]
    """Byte of the first row's length prefix, by column in the order of the fields."""

    def __str__(self) -> str:
        """File and row group, for messages."""
        return f"{self.file.path}, row group {self.number}"


def value_prefix(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """What every value of a column starts with: its length, and the header of the array in it."""
    header = array_header(shape, dtype)
    width = len(header) + int(np.prod(shape)) * dtype.itemsize
    return width.to_bytes(_LENGTH_BYTES, "little") + header


def value_bytes(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """Bytes of one value with its prefix: the distance from row to row."""
    return len(value_prefix(shape, dtype)) + int(np.prod(shape)) * dtype.itemsize


def open_row_groups(path: Path, fields: Fields) -> list[RowGroup]:
    """Open a Parquet file and find its rows.

    Raises:
        OSError: It cannot be opened.
        LayoutError: Its rows have no fixed places; any other reader can still read it.
        ValueError: It is no Parquet, or lacks a column; names the file.
    """
    file = OpenFile(path)
    try:
        metadata = pq.read_metadata(path)
    except (OSError, ValueError) as error:  # pyarrow names no path
        raise ValueError(f"shard {path} is not Parquet: {error}") from None
    size = os.fstat(file.descriptor).st_size
    groups = []
    for number in range(metadata.num_row_groups):
        row_group = metadata.row_group(number)
        chunks = {row_group.column(i).path_in_schema: row_group.column(i) for i in range(row_group.num_columns)}
        missing = [name for name in fields if name not in chunks]
        if missing:
            raise ValueError(f"shard {path}, row group {number}: no column {missing[0]!r}")
        starts = tuple(
            _start(chunks[name], row_group.num_rows, value_bytes(*field), size, f"shard {path}, row group {number}")
            for name, field in fields.items()
        )
        groups.append(RowGroup(file, number, row_group.num_rows, starts))
        _check_first_row(groups[-1], fields)
    return groups


def _start(chunk: pq.ColumnChunkMetaData, rows: int, stride: int, size: int, where: str) -> int:
    page_header = chunk.total_uncompressed_size - rows * stride
    start: int = chunk.data_page_offset + page_header
    if (
        chunk.compression != "UNCOMPRESSED"
        or chunk.dictionary_page_offset is not None
        or not 0 < page_header < _MAXIMUM_PAGE_HEADER_BYTES
        or start + rows * stride > size
    ):
        raise LayoutError(f"{where}: column {chunk.path_in_schema!r} is not one plain page of {stride}-byte values")
    return start


def _check_first_row(group: RowGroup, fields: Fields) -> None:
    for (name, field), start in zip(fields.items(), group.starts, strict=True):
        prefix = value_prefix(*field)
        if os.pread(group.file.descriptor, len(prefix), start) != prefix:
            raise LayoutError(f"shard {group}: column {name!r} does not hold {field[1]} arrays of shape {field[0]}")
