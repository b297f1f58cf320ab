"""Converts the columns of any Parquet file to the encoding and the checksums of our own writer."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.dataset.format.columns import CHECKSUM_FIELD
from pipelines.dataset.format.layout import LENGTH_BYTES, value_bytes, value_prefix
from pipelines.dataset.format.rows import ColumnBuffer, Fields, row_checksum


def encoded(table: pa.Table, fields: Fields) -> pa.Table:
    """Return the required columns of fixed width, each value encoded as our writer encodes it.

    Raises:
        ValueError: A value is missing, is no array, or has another shape or dtype. The message names column and row.
    """
    missing = [name for name in fields if name not in table.column_names]
    if missing:
        raise ValueError(f"no column {missing[0]!r}, only {', '.join(table.column_names) or 'no columns at all'}")
    columns = [_column(table[name].combine_chunks(), name, *field) for name, field in fields.items()]
    return pa.table(columns, schema=pa.schema([pa.field(name, pa.binary(), nullable=False) for name in fields]))


def stored_checksums(source: pa.Table) -> NDArray[np.uint32]:
    """Read the column of checksums, which other programs may have widened to 64 bits.

    Raises:
        ValueError: The column or a checksum is missing, or a checksum is no 32-bit number.
    """
    if CHECKSUM_FIELD not in source.column_names:
        raise ValueError(f"no column {CHECKSUM_FIELD!r}")
    column = source[CHECKSUM_FIELD]
    if column.null_count:
        raise ValueError(f"column {CHECKSUM_FIELD!r} has {column.null_count} missing values")
    try:
        values: NDArray[np.uint32] = column.cast(pa.uint32()).to_numpy()
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {CHECKSUM_FIELD!r}: {error}") from None
    return values


def computed_checksums(table: pa.Table, fields: Fields) -> NDArray[np.uint32]:
    """Compute the checksum of every row of `encoded`'s result; the values are not copied."""
    columns = [array_bytes(table[name].combine_chunks(), *field) for name, field in fields.items()]
    rows = (row_checksum([column[row].data for column in columns]) for row in range(len(table)))
    return np.fromiter(rows, np.uint32, len(table))


def array_bytes(values: pa.BinaryArray, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.uint8]:
    """Return the arrays of a column of `encoded`'s result as bytes, `(rows, bytes)`, without a copy."""
    header = len(value_prefix(shape, dtype)) - LENGTH_BYTES
    return _values(values, value_bytes(shape, dtype) - LENGTH_BYTES)[:, header:]


def _values(array: pa.Array, width: int) -> NDArray[np.uint8]:
    """Return the bytes of a binary array whose values all have one width, as `(rows, width)`."""
    if len(array) == 0:
        return np.empty((0, width), np.uint8)
    first = np.frombuffer(array.buffers()[1], np.int32)[array.offset]
    data = np.frombuffer(array.buffers()[2], np.uint8)
    return data[first : first + len(array) * width].reshape(len(array), width)


def _column(values: pa.Array, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> pa.Array:
    if not pa.types.is_binary(values.type):
        raise ValueError(f"column {name!r} is {values.type}, expected binary arrays")
    if values.null_count:
        raise ValueError(f"column {name!r} has {values.null_count} missing values")
    if is_encoded(values, shape, dtype):
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


def is_encoded(values: pa.BinaryArray, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bool:
    """Return whether every value is what `ColumnBuffer` would write, so that it needs no conversion."""
    if len(values) == 0:
        return True
    header = np.frombuffer(value_prefix(shape, dtype)[LENGTH_BYTES:], np.uint8)
    width = value_bytes(shape, dtype) - LENGTH_BYTES
    offsets: NDArray[np.int32] = np.frombuffer(values.buffers()[1], np.int32)[
        values.offset : values.offset + len(values) + 1
    ]
    if (np.diff(offsets) != width).any():
        return False
    return bool((_values(values, width)[:, : len(header)] == header).all())
