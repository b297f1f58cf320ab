"""What other programs find in a dataset: all samples, only samples, and the plain columns with their types."""

import datetime
import shutil
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipelines.archives.bigearthnet.v2 import METADATA
from pipelines.archives.table import open_archive
from pipelines.dataset.format.columns import METADATA_SCHEMA
from pipelines.dataset.format.files import REJECTED_FILE
from pipelines.dataset.prepare.writer import prepare_dataset

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def dataset(spark: SparkSession, small_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 55 samples, and one that was rejected."""
    root = Path(shutil.copytree(small_archive, tmp_path_factory.mktemp("archive") / "BigEarthNet"))
    table = pq.read_table(root / METADATA)
    labels = pa.array([["No such class"], *table["labels"].to_pylist()[1:]], table.schema.field("labels").type)
    pq.write_table(table.set_column(table.column_names.index("labels"), "labels", labels), root / METADATA)
    path = tmp_path_factory.mktemp("datasets") / "dataset"
    archive = open_archive("bigearthnet_v2", root=str(root))
    prepare_dataset(spark, archive, path, row_group_mib=1, row_groups_per_shard=2, max_rejected_fraction=0.1)
    assert pq.read_table(path / REJECTED_FILE).num_rows == 1
    return path


@pytest.fixture(scope="module")
def expected(dataset: Path) -> dict[str, dict[str, Any]]:
    """The plain columns by id, as pyarrow reads them file by file."""
    rows = [
        row
        for path in dataset.glob("*/part-*")
        for row in pq.ParquetFile(path).read(["id", *METADATA_SCHEMA.names]).to_pylist()
    ]
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows) == 55
    return found


def test_the_plain_columns_say_what_the_archive_knows(expected: dict[str, dict[str, Any]]) -> None:
    for name, row in expected.items():
        assert (row["tile"], row["acquisition_date"], row["epsg"], row["flags"]) == (
            name.split("_")[5].removeprefix("T"),
            datetime.date.fromisoformat(name[11:19]),
            32600 + int(row["tile"][:2]),
            [],
        )
        assert row["label_names"]
    assert {row["split"] for row in expected.values()} == {"train", "validation", "test"}
    assert {"Portugal", "Finland"} < {row["country"] for row in expected.values()}
    assert (
        {row["season"] for row in expected.values()},
        len({(row["epsg"], row["x0"], row["y0"]) for row in expected.values()}),
    ) == ({"winter", "spring", "summer", "autumn"}, 55)


def test_spark_reads_all_splits_at_once(
    spark: SparkSession, dataset: Path, expected: dict[str, dict[str, Any]]
) -> None:
    # The filter passes over dataset.json and report.html, Spark itself over names with an underscore.
    frame = spark.read.options(recursiveFileLookup=True, pathGlobFilter="*.parquet").parquet(str(dataset))
    types = dict(frame.dtypes)
    assert types["label_names"] == types["flags"] == "array<string>"
    assert (types["acquisition_date"], types["epsg"], types["x0"]) == ("date", "int", "double")
    rows = [row.asDict() for row in frame.select("id", *METADATA_SCHEMA.names).collect()]
    assert (len(rows), {row["id"]: row for row in rows}) == (55, expected)
    assert frame.where("country = 'Finland' and season = 'spring' and month(acquisition_date) = 5").count() > 0


def test_duckdb_reads_all_splits_at_once(dataset: Path, expected: dict[str, dict[str, Any]]) -> None:
    names = ", ".join(["id", *METADATA_SCHEMA.names])
    with duckdb.connect() as connection:
        cursor = connection.execute(f"select {names} from '{dataset}/*/part-*.parquet'")
        columns = [column[0] for column in cursor.description or []]
        rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
    assert (len(rows), {row["id"]: row for row in rows}) == (55, expected)


def test_polars_reads_all_splits_at_once(dataset: Path, expected: dict[str, dict[str, Any]]) -> None:
    frame = polars.read_parquet(f"{dataset}/*/part-*.parquet", columns=["id", *METADATA_SCHEMA.names])
    assert (frame.height, {row["id"]: row for row in frame.to_dicts()}) == (55, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of pyarrow, for each of Petastorm's calls
def test_petastorm_opens_a_split_without_the_plain_columns(dataset: Path, expected: dict[str, dict[str, Any]]) -> None:
    from petastorm import make_reader

    for split in ("train", "validation", "test"):
        with make_reader((dataset / split).as_uri(), num_epochs=1, reader_pool_type="dummy") as reader:
            rows = list(reader)
        assert ({row.id for row in rows}, set(rows[0]._fields), rows[0].bands_10m.shape) == (
            {name for name, row in expected.items() if row["split"] == split},
            {"id", "labels", "bands_10m", "bands_20m", "bands_60m"},
            (120, 120, 4),
        )
