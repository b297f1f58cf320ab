"""Rows as Arrow columns: values of one width, so that a row of the Parquet file can be mapped."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from petastorm.codecs import NdarrayCodec, ScalarCodec
from petastorm.unischema import Unischema, UnischemaField
from pyspark.sql.types import StringType

from pipelines.dataset.columns import ID_FIELD, LABEL_FIELD
from pipelines.sample import ImageGroup


def fixed_fields(
    groups: Sequence[ImageGroup], class_count: int
) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
    """Shape and dtype of every column of fixed width, in column order."""
    return {
        LABEL_FIELD: ((class_count,), np.dtype(np.uint8)),
        **{group.name: (group.shape, np.dtype(group.dtype)) for group in groups},
    }


def petastorm_schema(groups: Sequence[ImageGroup], class_count: int) -> Unischema:
    """The same columns in Petastorm's words."""
    fields = [UnischemaField(ID_FIELD, np.str_, (), ScalarCodec(StringType()), False)]
    for name, (shape, dtype) in fixed_fields(groups, class_count).items():
        fields.append(UnischemaField(name, dtype.type, shape, NdarrayCodec(), False))
    return Unischema("Sample", fields)


def arrow_schema(groups: Sequence[ImageGroup], class_count: int) -> pa.Schema:
    """Columns of a shard: the id, then one required binary column per array."""
    fields = [pa.field(ID_FIELD, pa.string(), nullable=False)]
    fields += [pa.field(name, pa.binary(), nullable=False) for name in fixed_fields(groups, class_count)]
    return pa.schema(fields)


def array_header(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """The `.npy` header that Petastorm's NdarrayCodec stores before the C-ordered values."""
    stream = io.BytesIO()
    layout = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, layout)  # type: ignore[no-untyped-call]
    return stream.getvalue()


class ColumnBuffer:
    """Encoded values of one column for up to `capacity` rows, one buffer, written in place and reused."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], capacity: int) -> None:
        header = np.frombuffer(array_header(shape, dtype), np.uint8)
        self._shape, self._dtype = shape, dtype
        self._bytes = np.empty((capacity, len(header) + int(np.prod(shape)) * dtype.itemsize), np.uint8)
        self._bytes[:, : len(header)] = header
        self._values = self._bytes[:, len(header) :]

    def row(self, row: int) -> NDArray[Any]:
        """The value of `row`, to be written in place."""
        value: NDArray[Any] = self._values[row].view(self._dtype).reshape(self._shape)
        return value

    def values(self, rows: int) -> NDArray[np.generic]:
        """The first `rows` values as `(rows, *shape)`, in place."""
        return self._values[:rows].view(self._dtype).reshape(rows, *self._shape)

    def arrow(self, rows: int) -> pa.Array:
        """The first `rows` encoded values as a binary array over the same memory."""
        width = self._bytes.shape[1]
        offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int64)
        if offsets[-1] > np.iinfo(np.int32).max:
            raise ValueError(f"{rows} rows of {width} bytes do not fit one Arrow binary array (2 GiB)")
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(self._bytes[:rows].reshape(-1))]
        return pa.Array.from_buffers(pa.binary(), rows, buffers)
