"""Rows as Arrow columns. Values have one width, so each row has a fixed position in the Parquet file."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c
from numpy.typing import NDArray

from pipelines.dataset.format.columns import CHECKSUM_FIELD, ID_FIELD, LABEL_FIELD, METADATA_SCHEMA
from pipelines.sample import ImageGroup

Fields = Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]
"""Shape and dtype of every column of fixed width."""


def fixed_fields(
    groups: Sequence[ImageGroup], class_count: int
) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
    """Return the shape and dtype of every column of fixed width, in column order."""
    return {
        LABEL_FIELD: ((class_count,), np.dtype(np.uint8)),
        **{group.name: (group.shape, np.dtype(group.dtype)) for group in groups},
    }


def arrow_schema(groups: Sequence[ImageGroup], class_count: int, kept: Sequence[pa.Field] = ()) -> pa.Schema:
    """Build a shard's columns: id, one required binary column per array, checksum, metadata, and the user's own."""
    return pa.schema(
        [
            pa.field(ID_FIELD, pa.string(), nullable=False),
            *(pa.field(name, pa.binary(), nullable=False) for name in fixed_fields(groups, class_count)),
            pa.field(CHECKSUM_FIELD, pa.uint32(), nullable=False),
            *METADATA_SCHEMA,
            *kept,
        ]
    )


def row_checksum(values: Iterable[memoryview]) -> int:
    """Compute the CRC-32C of one row, the value of column `crc32c`.

    It covers the labels and then every image group in the order of `dataset.json`. Each array counts with its values
    only, in C order and little-endian, without the `.npy` header. The id is not covered: see `columns.plain_values`.

    Args:
        values: The contiguous arrays of one row, the labels first.

    Source: Castagnoli, Braeuer, Herrmann (1993), the CRC of iSCSI (RFC 3720): reflected polynomial 0x82F63B78, initial
    value and final XOR 0xFFFFFFFF. The CRC of `b"123456789"` is 0xE3069283.
    """
    checksum = 0
    for value in values:
        checksum = crc32c(value, checksum)
    return checksum


def array_header(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """Build the `.npy` header that Petastorm's NdarrayCodec stores before the C-ordered values."""
    stream = io.BytesIO()
    layout = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, layout)  # type: ignore[no-untyped-call]
    return stream.getvalue()


class ColumnBuffer:
    """A reusable buffer for the encoded values of one column, up to `capacity` rows."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], capacity: int) -> None:
        header = np.frombuffer(array_header(shape, dtype), np.uint8)
        self._shape, self._dtype = shape, dtype
        self._bytes = np.empty((capacity, len(header) + int(np.prod(shape)) * dtype.itemsize), np.uint8)
        self._bytes[:, : len(header)] = header
        self._values = self._bytes[:, len(header) :]

    def row(self, row: int) -> NDArray[Any]:
        """Return the value of `row`, which the caller fills in place."""
        return self._values[row, :].view(self._dtype).reshape(self._shape)

    def values(self, rows: int) -> NDArray[np.generic]:
        """Return the first `rows` values as `(rows, *shape)`, without a copy."""
        return self._values[:rows].view(self._dtype).reshape(rows, *self._shape)

    def arrow(self, rows: int) -> pa.Array:
        """Return the first `rows` encoded values as a binary array that shares the memory."""
        width = self._bytes.shape[1]
        offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int64)
        if offsets[-1] > np.iinfo(np.int32).max:
            raise ValueError(f"{rows} rows of {width} bytes do not fit one Arrow binary array (2 GiB)")
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(self._bytes[:rows].reshape(-1))]
        return pa.Array.from_buffers(pa.binary(), rows, buffers)
