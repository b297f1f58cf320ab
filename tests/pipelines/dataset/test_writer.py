import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rasterio
from petastorm import make_reader
from pyspark.sql import SparkSession

from pipelines.archives.archive import read_sample
from pipelines.archives.bigearthnet_v2 import BigEarthNetV2
from pipelines.dataset.columns import METADATA_SCHEMA
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.plan import plan_shards
from pipelines.dataset.shard import ShardPlan
from pipelines.dataset.writer import prepare_dataset

pytestmark = [
    pytest.mark.spark,
    # Petastorm 0.13 uses names that the pinned pyarrow and numpy deprecate.
    pytest.mark.filterwarnings("ignore::FutureWarning:petastorm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:petastorm"),
]


@pytest.fixture(scope="module")
def manifest(small_dataset: Path) -> Manifest:
    return read_manifest(small_dataset)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_petastorms_own_reader_sees_every_pixel_as_rasterio_does(
    small_dataset: Path, small_archive: Path, manifest: Manifest, split: str
) -> None:
    metadata = {row["patch_id"]: row for row in pq.read_table(small_archive / "metadata.parquet").to_pylist()}
    expected = {name for name, row in metadata.items() if row["split"] == split}
    seen = set()
    with make_reader((small_dataset / split).as_uri(), reader_pool_type="dummy", shuffle_row_groups=False) as reader:
        for row in reader:
            seen.add(row.id)
            folder = small_archive / "BigEarthNet-S2" / row.id.rsplit("_", 2)[0] / row.id
            for group in manifest.groups:
                image = getattr(row, group.name)
                assert image.dtype == np.uint16
                for position, band in enumerate(group.bands):
                    with rasterio.open(folder / f"{row.id}_{band}.tif") as file:
                        np.testing.assert_array_equal(image[..., position], file.read(1))
            names = {manifest.class_names[index] for index in np.flatnonzero(row.labels)}
            assert names == set(metadata[row.id]["labels"])
    assert seen == expected


def test_spark_and_pyarrow_open_a_split(spark: SparkSession, small_dataset: Path) -> None:
    frame = spark.read.parquet(str(small_dataset / "train"))
    assert frame.count() == 32
    arrays = {"labels", "bands_10m", "bands_20m", "bands_60m"}
    assert set(frame.columns) == {"id", "crc32c"} | arrays | set(METADATA_SCHEMA.names)
    assert pq.read_table(small_dataset / "train" / "part-00000.parquet").num_rows > 0


def test_manifest_counts_and_statistics(small_dataset: Path, small_archive: Path, manifest: Manifest) -> None:
    metadata = pq.read_table(small_archive / "metadata.parquet").to_pylist()
    training = [row for row in metadata if row["split"] == "train"]
    for index, name in enumerate(manifest.class_names):
        assert manifest.splits["train"].class_counts[index] == sum(name in row["labels"] for row in training)
    archive = BigEarthNetV2(str(small_archive))
    paths = [f"BigEarthNet-S2/{row['patch_id'].rsplit('_', 2)[0]}/{row['patch_id']}" for row in training]
    pixels = np.stack([read_sample(archive, [path])["bands_20m"] for path in paths]).reshape(-1, 6).astype(np.float64)
    assert manifest.statistics["bands_20m"].mean == pytest.approx(pixels.mean(axis=0))
    assert manifest.statistics["bands_20m"].std == pytest.approx(pixels.std(axis=0))


def test_files_are_as_the_manifest_says(small_dataset: Path, manifest: Manifest) -> None:
    files = {str(path.relative_to(small_dataset)) for path in small_dataset.rglob("*.parquet")}
    shards = {shard.file for split in manifest.splits.values() for shard in split.shards}
    assert files == shards | {"_rejected.parquet", "_index.parquet"}
    for split in manifest.splits.values():
        for shard in split.shards:
            metadata = pq.read_metadata(small_dataset / shard.file)
            assert tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)) == shard.row_groups


def test_shards_hold_every_sample_once_and_are_balanced(small_archive: Path) -> None:
    archive = BigEarthNetV2(str(small_archive))
    plans = plan_shards(archive, archive.index(), row_group_mib=1, row_groups_per_shard=1, seed=0)
    sizes = [plan.rows for plan in plans["train"]]
    assert max(sizes) - min(sizes) <= 1
    assert len({sample for plan in plans["train"] for sample in ids(plan)}) == 32
    other = plan_shards(archive, archive.index(), row_group_mib=1, row_groups_per_shard=1, seed=1)
    assert [ids(plan) for plan in plans["train"]] != [ids(plan) for plan in other["train"]]


def ids(plan: ShardPlan) -> list[str]:
    names: list[str] = pa.ipc.open_stream(plan.samples).read_all()["id"].to_pylist()
    return names


def test_a_finished_dataset_is_left_alone_and_another_is_refused(
    spark: SparkSession, small_archive: Path, small_dataset: Path
) -> None:
    archive = BigEarthNetV2(str(small_archive))
    before = {path: path.stat().st_mtime_ns for path in small_dataset.rglob("*")}
    prepare_dataset(spark, archive, small_dataset, row_group_mib=1, row_groups_per_shard=2, seed=3)
    assert before == {path: path.stat().st_mtime_ns for path in small_dataset.rglob("*")}
    with pytest.raises(ValueError, match="seed 3 there, 4 asked for"):
        prepare_dataset(spark, archive, small_dataset, row_group_mib=1, row_groups_per_shard=2, seed=4)


def test_a_folder_that_is_no_dataset_is_refused(spark: SparkSession, small_archive: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="exists and is not a dataset"):
        prepare_dataset(spark, BigEarthNetV2(str(small_archive)), tmp_path / "mine")


def test_dataset_json_is_plain_json(small_dataset: Path) -> None:
    values = json.loads((small_dataset / "dataset.json").read_text())
    assert values["task"] == "multi_label"
    assert [group["name"] for group in values["groups"]] == ["bands_10m", "bands_20m", "bands_60m"]
