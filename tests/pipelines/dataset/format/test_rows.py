import io

import numpy as np
import pyarrow as pa
import pytest

from pipelines.dataset.format.rows import ColumnBuffer, arrow_schema, row_checksum
from pipelines.sample import ImageGroup

GROUPS = (ImageGroup("fine", (2, 2, 1), "uint16", ("B02",)), ImageGroup("coarse", (1, 1, 2), "uint8", ("B01", "B09")))


def crc32c_by_definition(data: bytes) -> int:
    """Bit by bit: reflected polynomial 0x82F63B78, initial value and final XOR of ones."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_published_check_value() -> None:
    assert (
        row_checksum([memoryview(b"123456789")]),
        row_checksum([memoryview(b"1234"), memoryview(b""), memoryview(b"56789")]),
    ) == (0xE3069283, 0xE3069283)


def test_a_checksum_covers_labels_and_images_in_order() -> None:
    labels, fine, coarse = np.array([0, 1], np.uint8), np.arange(4, dtype=np.uint16), np.array([[[7, 9]]], np.uint8)
    expected = crc32c_by_definition(labels.tobytes() + fine.astype("<u2").tobytes() + coarse.tobytes())
    assert row_checksum([labels.data, fine.reshape(2, 2, 1).data, coarse.data]) == expected
    assert row_checksum([labels.data, coarse.data, fine.data]) != expected


def test_columns_of_a_shard() -> None:
    schema = arrow_schema(GROUPS, 3)
    assert (schema.names[:5], schema.field("crc32c")) == (
        ["id", "labels", "fine", "coarse", "crc32c"],
        pa.field("crc32c", pa.uint32(), nullable=False),
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_a_column_holds_what_numpy_saves(dtype: str) -> None:
    column = ColumnBuffer((2, 3, 1), np.dtype(dtype), capacity=4)
    for row in range(3):
        column.row(row)[:] = row
    stream = io.BytesIO()
    np.save(stream, np.full((2, 3, 1), 2, dtype))
    # numpy pads its header to 64 bytes, as Petastorm's codec does.
    assert column.arrow(3)[2].as_py() == stream.getvalue()
