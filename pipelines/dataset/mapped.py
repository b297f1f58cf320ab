"""Rows of an ordinary Parquet file as views of its memory map.

A column chunk that `pipelines.dataset.shard` wrote is one uncompressed plain data page of required binary values of
one width: `rows * (4 + width)` bytes, each value behind its little-endian 4-byte length. None of this is assumed:
each file is checked when it is opened.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.dataset.manifest import Shard
from pipelines.dataset.rows import array_header

_LENGTH_BYTES = 4
_MAXIMUM_PAGE_HEADER_BYTES = 1024


class MappedShard:
    """One Parquet file; `columns[name][row_group]` is a `MappedColumn`."""

    def __init__(
        self, path: Path, shard: Shard, fields: Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]
    ) -> None:
        """Map the file and check its layout.

        Raises:
            FileNotFoundError: It is not there.
            ValueError: Its size, rows or layout are not what the manifest and the fields say; names the file.
        """
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"shard {path} is missing: prepare the dataset again")
        if path.stat().st_size != shard.size:
            raise ValueError(f"shard {path} has {path.stat().st_size} bytes, its manifest says {shard.size}")
        try:
            metadata = pq.read_metadata(path)
        except (OSError, ValueError) as error:  # pyarrow names no path
            raise ValueError(f"shard {path} is not Parquet: {error}") from None
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if tuple(rows) != shard.row_groups:
            raise ValueError(f"shard {path} has row groups of {rows} rows, its manifest says {shard.row_groups}")
        with path.open("rb") as file:
            # Read-only pages that stay valid as long as any view of them lives.
            bytes_ = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self.columns = {
            name: [
                MappedColumn(bytes_, metadata.row_group(i), name, shape, dtype, f"shard {path}, row group {i}")
                for i in range(metadata.num_row_groups)
            ]
            for name, (shape, dtype) in fields.items()
        }


class MappedColumn:
    """One fixed-width column of one row group: `(rows, stride)` bytes of the map, every value behind its prefix."""

    def __init__(
        self,
        file: NDArray[np.uint8],
        row_group: pq.RowGroupMetaData,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[np.generic],
        where: str,
    ) -> None:
        """Find the values and check the first; `copy_row` checks each one that it reads."""
        chunks = (row_group.column(i) for i in range(row_group.num_columns))
        chunk = next((chunk for chunk in chunks if chunk.path_in_schema == name), None)
        if chunk is None:
            raise ValueError(f"{where}: no column {name!r}")
        header = array_header(shape, dtype)
        width = len(header) + int(np.prod(shape)) * dtype.itemsize
        rows, stride = row_group.num_rows, _LENGTH_BYTES + width
        page_header = chunk.total_uncompressed_size - rows * stride
        start = chunk.data_page_offset + page_header
        if (
            chunk.compression != "UNCOMPRESSED"
            or chunk.dictionary_page_offset is not None
            or not 0 < page_header < _MAXIMUM_PAGE_HEADER_BYTES
            or start + rows * stride > len(file)
        ):
            raise ValueError(f"{where}: column {name!r} is not one plain page of {width}-byte values")
        self._where = f"{where}: column {name!r} does not hold {dtype} arrays of shape {shape}"
        self._prefix = width.to_bytes(_LENGTH_BYTES, "little") + header
        self._rows = file[start : start + rows * stride].reshape(rows, stride)
        self._check(0)

    def copy_row(self, row: int, out: NDArray[np.uint8]) -> None:
        """Copy the value of `row` into `out`, contiguous bytes."""
        self._check(row)
        out[:] = self._rows[row, len(self._prefix) :]

    def _check(self, row: int) -> None:
        if self._rows[row, : len(self._prefix)].tobytes() != self._prefix:
            raise ValueError(f"{self._where} at row {row}: the file was damaged or changed")
