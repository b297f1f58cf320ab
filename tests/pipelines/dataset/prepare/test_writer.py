from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rasterio
from petastorm import make_reader

from pipelines.archives.archive import read_sample
from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.dataset.prepare.plan import plan_shards
from pipelines.dataset.prepare.shard import ShardPlan

pytestmark = [
    pytest.mark.spark,
    # Petastorm 0.13 uses names that the pinned pyarrow and numpy deprecate.
    pytest.mark.filterwarnings("ignore::FutureWarning:petastorm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:petastorm"),
]


@pytest.fixture(scope="module")
def manifest(small_dataset: Path) -> Manifest:
    return read_manifest(small_dataset)


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_petastorms_own_reader_sees_every_pixel_as_rasterio_does(
    small_dataset: Path, small_archive: Path, manifest: Manifest, split: str
) -> None:
    metadata = {row["patch_id"]: row for row in pq.read_table(small_archive / "metadata.parquet").to_pylist()}
    expected, seen = {name for name, row in metadata.items() if row["split"] == split}, set()
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
            assert {manifest.class_names[index] for index in np.flatnonzero(row.labels)} == set(
                metadata[row.id]["labels"]
            )
    assert seen == expected


def test_manifest_counts_and_statistics(small_dataset: Path, small_archive: Path, manifest: Manifest) -> None:
    training = [row for row in pq.read_table(small_archive / "metadata.parquet").to_pylist() if row["split"] == "train"]
    assert list(manifest.splits["train"].class_counts) == [
        sum(name in row["labels"] for row in training) for name in manifest.class_names
    ]
    archive = BigEarthNetV2(str(small_archive))
    paths = [f"BigEarthNet-S2/{row['patch_id'].rsplit('_', 2)[0]}/{row['patch_id']}" for row in training]
    pixels = np.stack([read_sample(archive, [path])["bands_20m"] for path in paths]).reshape(-1, 6).astype(np.float64)
    assert manifest.statistics["bands_20m"].mean == pytest.approx(pixels.mean(axis=0))
    assert manifest.statistics["bands_20m"].std == pytest.approx(pixels.std(axis=0))


def test_shards_hold_every_sample_once_and_are_balanced(small_archive: Path) -> None:
    archive = BigEarthNetV2(str(small_archive))
    plans = plan_shards(archive, archive.index(), row_group_mib=1, row_groups_per_shard=1, seed=0)
    sizes = [plan.rows for plan in plans["train"]]
    assert max(sizes) - min(sizes) <= 1
    assert len({sample for plan in plans["train"] for sample in ids(plan)}) == 32
    other = plan_shards(archive, archive.index(), row_group_mib=1, row_groups_per_shard=1, seed=1)
    assert [ids(plan) for plan in plans["train"]] != [ids(plan) for plan in other["train"]]


def ids(plan: ShardPlan) -> list[str]:
    return pa.ipc.open_stream(plan.samples).read_all()["id"].to_pylist()
