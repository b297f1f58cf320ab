import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from pipelines.archives.archive import (
    INDEX_SCHEMA,
    REJECTED_SCHEMA,
    ArchiveDescription,
    ArchiveIndex,
    BadRecordError,
    index_table,
    read_sample,
)
from pipelines.sample import ImageGroup


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
    assert (table["flags"].to_pylist(), table["acquisition_date"].to_pylist()) == (
        [["snow"], []],
        [datetime.date(2018, 5, 6), None],
    )
    assert [table[name].to_pylist() for name in ("size", "country", "season", "tile")] == [[None, None]] * 4


def test_a_required_column_must_be_given() -> None:
    with pytest.raises(KeyError, match="split"):
        index_table({"id": ["a"], "labels": [[0]], "paths": [["a"]]})


class Radar:
    """An archive whose values are floats."""

    description = ArchiveDescription(
        "radar", "single_label", ("a", "b"), (ImageGroup("backscatter", (4, 5, 2), "float16", ("VV", "VH")),)
    )
    read_settings: Mapping[str, int | str | None] = {}

    def __init__(self, root: str, values: Sequence[float]) -> None:
        self.root, self._values = root, values

    def index(self) -> ArchiveIndex:
        return ArchiveIndex(INDEX_SCHEMA.empty_table(), REJECTED_SCHEMA.empty_table())

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> None:
        out["backscatter"][...] = -10
        out["backscatter"][0, : len(self._values), 1] = self._values


@pytest.mark.parametrize(
    ("values", "reason", "count"),
    [([np.nan], "NaN", 1), ([-np.inf, np.inf], "infinite value", 2), ([np.inf, np.nan, 0], "NaN", 2)],
)
def test_values_that_are_no_numbers_are_a_bad_record(values: list[float], reason: str, count: int) -> None:
    for root, named in (("/radar/", "/radar/x/1, y/1"), ("", "x/1, y/1")):
        with pytest.raises(BadRecordError) as caught:
            read_sample(Radar(root, values), ["x/1", "y/1"])
        assert (str(caught.value), caught.value.reason) == (
            f"{named}, band VH of backscatter: {reason} ({count} of 20 pixels)",
            reason,
        )
    assert read_sample(Radar("", [65_504, -0.0]), ["x/1"])["backscatter"].max() == 65_504
