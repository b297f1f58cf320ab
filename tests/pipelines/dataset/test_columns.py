import datetime

import pyarrow as pa

from pipelines.archives.archive import Georeference, index_table
from pipelines.dataset.columns import METADATA_SCHEMA, label_vector, metadata_columns


def test_what_the_index_and_the_image_files_know() -> None:
    index = index_table(
        {
            "id": ["a", "b", "c"],
            "split": ["train"] * 3,
            "labels": [[0, 2], [1], []],
            "paths": [["a"], ["b"], ["c"]],
            "country": ["Finland", None, None],
            "acquisition_date": [datetime.date(2018, 5, 6), None, None],
            "flags": [["snow"], [], None],
        }
    )
    columns = metadata_columns(index.take([2, 0]), ("x", "y", "z"), [None, Georeference(32633, 300_000.0, 5e6)])
    table = pa.table(columns, schema=METADATA_SCHEMA)
    table.validate(full=True)
    empty = dict.fromkeys(METADATA_SCHEMA.names)
    assert table.to_pylist() == [
        {**empty, "label_names": [], "split": "train"},
        {
            **empty,
            "label_names": ["x", "z"],
            "split": "train",
            "country": "Finland",
            "acquisition_date": datetime.date(2018, 5, 6),
            "flags": ["snow"],
            "epsg": 32633,
            "x0": 300_000.0,
            "y0": 5e6,
        },
    ]


def test_multi_hot_labels() -> None:
    assert label_vector([0, 3], 4).tolist() == [1, 0, 0, 1]
