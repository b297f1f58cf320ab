from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import rasterio

from pipelines.archives.archive import read_sample
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.bigearthnet.v2 import GROUPS, BigEarthNetV2
from pipelines.archives.synthetic.files import METADATA_SCHEMA, generate_bigearthnet_v2
from pipelines.archives.synthetic.landscape import land_cover, render
from pipelines.archives.synthetic.scenes import CAPACITY, patch
from tests.pipelines.archives.files import fill


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_archive_opens_and_holds_what_was_drawn(generated: Path) -> None:
    archive = BigEarthNetV2(str(generated))
    index = {row["id"]: row for row in archive.index().samples.to_pylist()}
    splits = ["train"] * 12 + ["validation"] * 4 + ["test"] * 4
    assert len(index) == len(splits)
    for number, split in enumerate(splits):
        row = index[patch(number).id]
        assert (row["split"], tuple(row["labels"])) == (split, land_cover(0, number)[1])
        images, _ = render(0, number, GROUPS)
        np.testing.assert_equal(read_sample(archive, row["paths"]), images)


def test_metadata_names_labels_in_the_published_order(generated: Path) -> None:
    table = pq.read_table(generated / "metadata.parquet")
    assert table.schema.equals(METADATA_SCHEMA)
    assert table["patch_id"].to_pylist() == sorted(table["patch_id"].to_pylist())
    assert [names for names in table["labels"].to_pylist() if names != sorted(set(names) & set(BIGEARTHNET_19))] == []


def test_metadata_has_the_published_columns(generated: Path, shared_data: Path) -> None:
    published = pq.ParquetFile(shared_data / "bigearthnet_v2_full_metadata" / "metadata.parquet")
    written = pq.ParquetFile(generated / "metadata.parquet")
    assert written.schema_arrow.equals(published.schema_arrow)
    columns = range(len(published.schema.names))
    assert [str(written.schema.column(i)) for i in columns] == [str(published.schema.column(i)) for i in columns]


@pytest.mark.parametrize("band", [band for group in GROUPS for band in group.bands])
def test_band_files_are_encoded_as_the_real_ones(generated: Path, shared_data: Path, band: str) -> None:
    real = next((shared_data / "bigearthnet_v2").glob(f"BigEarthNet-S2/*_T33UWP/*/*_{band}.tif"))
    ours = next(generated.glob(f"BigEarthNet-S2/*_T33UWP/*/*_{band}.tif"))
    with rasterio.open(real) as expected, rasterio.open(ours) as actual:
        place = {"transform": None}
        assert ({**actual.profile, **place}, actual.tags(), actual.res) == (
            {**expected.profile, **place},
            expected.tags(),
            expected.res,
        )
    # Header and directory: 16 tags of 12 bytes with the same types, counts, values and places of longer values.
    directory = slice(0, 8 + 2 + 16 * 12 + 4)
    assert (ours.read_bytes()[directory], ours.stat().st_size) == (real.read_bytes()[directory], real.stat().st_size)


def test_bytes_do_not_depend_on_the_number_of_processes(generated: Path, tmp_path: Path) -> None:
    steps, counts = [], {"train": 12, "validation": 4, "test": 4}
    generate_bigearthnet_v2(tmp_path / "parallel", **counts, processes=2, progress=steps.append)
    assert (tree(tmp_path / "parallel"), steps) == (tree(generated), [1] * 20)


def test_another_seed_is_another_archive(generated: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()  # an empty folder is filled
    generate_bigearthnet_v2(tmp_path / "other", train=1, validation=0, test=0, seed=1, processes=1)
    other = tree(tmp_path / "other")
    assert len(other) == 13
    name = next(name for name in other if name.endswith("_B02.tif"))
    assert other[name] != tree(generated)[name]


def test_a_finished_archive_is_left_alone(generated: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in generated.rglob("*")}
    generate_bigearthnet_v2(generated, train=12, validation=4, test=4, processes=1)
    assert {path: path.stat().st_mtime_ns for path in generated.rglob("*")} == before


@pytest.mark.parametrize(("train", "seed"), [(13, 0), (12, 1)])
def test_another_archive_is_not_overwritten(generated: Path, train: int, seed: int) -> None:
    before = tree(generated)
    with pytest.raises(ValueError, match=r"generated: exists and is not the archive with .* choose a new folder"):
        generate_bigearthnet_v2(generated, train=train, validation=4, test=4, seed=seed, processes=1)
    assert tree(generated) == before


@pytest.mark.parametrize("name", ["mine/metadata.parquet", "mine/notes.txt", "mine"])
def test_a_foreign_folder_or_file_is_not_overwritten(tmp_path: Path, name: str) -> None:
    fill(tmp_path, name)
    with pytest.raises(ValueError, match="mine: exists"):
        generate_bigearthnet_v2(tmp_path / "mine", train=1, validation=0, test=0, processes=1)
    assert tree(tmp_path) == {name: b"x"}


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, processes: int) -> None:
    def interrupt(_: int) -> None:
        assert not (tmp_path / "archive").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_bigearthnet_v2(
            tmp_path / "archive", train=20, validation=0, test=0, processes=processes, progress=interrupt
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": -1}, "expected 0 or more of each"),
        ({"train": 0}, "1 to 99372 in all"),
        ({"test": CAPACITY}, "1 to 99372 in all"),
    ],
)
def test_numbers_out_of_range(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    arguments: dict[str, Any] = {"train": 1, "validation": 0, "test": 0, "processes": 1} | changes
    with pytest.raises(ValueError, match=message):
        generate_bigearthnet_v2(tmp_path / "archive", **arguments)
    assert list(tmp_path.iterdir()) == []
