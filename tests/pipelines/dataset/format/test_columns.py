import datetime
import struct

import numpy as np
import pyarrow as pa
import pytest

from pipelines.dataset.format.columns import plain_values

DAY = datetime.date(1970, 1, 3)
TABLE = pa.table(
    {
        "id": ["a", "bé"],
        "labels": [b"xyz", b"y"],
        "crc32c": pa.array([5, 6], pa.uint32()),
        "country": ["PT", None],
        "flags": [None, ["snow", "x"]],
        "acquisition_date": [DAY, None],
        "x0": [None, 1.5],
        "seen": [True, None],
        "since": pa.array([None, 7], pa.timestamp("us")),
    }
)


def test_the_plain_values_by_their_definition() -> None:
    both, first, second = b"\1\1", b"\1\0", b"\0\1"
    assert plain_values(TABLE, {"labels"}) == b"".join(
        [
            b"id\n" + both + struct.pack("<ii", 1, 3) + "abé".encode(),
            b"crc32c\n" + both + struct.pack("<II", 5, 6),
            b"country\n" + first + struct.pack("<ii", 2, 0) + b"PT",
            b"flags\n" + second + struct.pack("<ii", 0, 2) + both + struct.pack("<ii", 4, 1) + b"snowx",
            b"acquisition_date\n" + first + struct.pack("<ii", 2, 0),
            b"x0\n" + second + struct.pack("<dd", 0, 1.5),
            b"seen\n" + first + b"\1\0",
            b"since\n" + second + struct.pack("<qq", 0, 7),
        ]
    )


def test_wider_types_slices_and_chunks_give_the_same_bytes() -> None:
    expected, wider = plain_values(TABLE, {"labels"}), TABLE.set_column(2, "crc32c", pa.array([5, 6], pa.int64()))
    wider = wider.set_column(0, "id", wider["id"].cast(pa.large_string()))
    assert (
        plain_values(wider, {"labels"}),
        plain_values(pa.concat_tables([TABLE, TABLE, TABLE]).slice(1, 4).slice(1, 2), {"labels"}),
    ) == (expected, expected)
    assert plain_values(TABLE.slice(0, 0), {"labels"}).startswith(b"id\n")


@pytest.mark.parametrize("column", [name for name in TABLE.column_names if name != "labels"])
def test_every_value_counts(column: str) -> None:
    swapped = TABLE.set_column(TABLE.column_names.index(column), column, TABLE[column].take(pa.array([1, 0])))
    assert plain_values(swapped, {"labels"}) != plain_values(TABLE, {"labels"})


def test_a_value_that_our_files_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="-6"):
        plain_values(TABLE.set_column(2, "crc32c", pa.array(np.array([5, -6]))), {"labels"})
