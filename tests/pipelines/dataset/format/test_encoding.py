"""Columns of other people's tables, as our writer encodes them."""

import numpy as np
import pyarrow as pa
import pytest

from pipelines.dataset.format.encoding import encoded

FIELDS = {"image": ((2, 2, 1), np.dtype("uint8"))}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"id": [1]}), "no column 'image', only id$"),
        (pa.table({}), "no column 'image', only no columns at all$"),
        (pa.table({"image": [1]}), "column 'image' is int64, expected binary arrays$"),
        (pa.table({"image": [b"1234", None]}), "column 'image' has 1 missing values$"),
    ],
)
def test_a_column_that_cannot_be_encoded_is_named(table: pa.Table, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoded(table, FIELDS)
