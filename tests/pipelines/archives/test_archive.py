import datetime

import pyarrow as pa
import pytest

from pipelines.archives.archive import INDEX_SCHEMA, index_table


def test_columns_that_are_not_given_are_null() -> None:
    table = index_table(
        {
            "id": pa.array(["a", "b"]),
            "split": ["train", "test"],
            "labels": [[0], [1, 2]],
            "paths": [["a"], ["b"]],
            "acquisition_date": [datetime.date(2018, 5, 6), None],
            "flags": [["snow"], []],
        }
    )
    assert table.schema.equals(INDEX_SCHEMA)
    assert table["flags"].to_pylist() == [["snow"], []]
    assert table["acquisition_date"].to_pylist() == [datetime.date(2018, 5, 6), None]
    for name in ("size", "country", "season", "tile"):
        assert table[name].to_pylist() == [None, None]


def test_a_required_column_must_be_given() -> None:
    with pytest.raises(KeyError, match="split"):
        index_table({"id": ["a"], "labels": [[0]], "paths": [["a"]]})
