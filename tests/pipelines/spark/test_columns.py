"""Columns whose names have characters that mean something in SQL."""

import pytest
from pyspark.sql import SparkSession

from pipelines.spark.columns import map_columns, select_columns


def test_columns_are_found_by_their_exact_names(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1, 2, 3)], "`a.b` int, `c``d` int, `e f` int")
    chosen = select_columns(frame, ["c`d", "a.b"])
    mapped = map_columns(frame, ["c`d", "a.b"], lambda batches: batches, "`c``d` int, `a.b` int")
    for found in (chosen, mapped):
        assert (found.columns, [tuple(row) for row in found.collect()]) == (["c`d", "a.b"], [(2, 1)])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("a int, b int", r"^the DataFrame has no column 'x'; its columns are a, b$"),
        ("x int, b int, X int", r"^the DataFrame has the columns 'x', 'X': rename all but one$"),
    ],
)
def test_what_cannot_be_selected_is_one_line(spark: SparkSession, columns: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_columns(spark.createDataFrame([], columns), ["x"])
