import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import rasterio

from pipelines.archives.archive import INDEX_SCHEMA, BadRecordError, read_sample
from pipelines.archives.bigearthnet_v2 import GROUPS, SPLITS, BigEarthNetV2, check_folders, read_metadata
from pipelines.archives.nomenclature import BIGEARTHNET_19

TILE = "S2A_MSIL2A_20170101T000001_N9999_R001_T33UUP"


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Two well-formed rows, the first with changes."""
    first = {"patch_id": f"{TILE}_09_10", "labels": ["Pastures", "Arable land"], "split": "train"}
    return [first | changes, {"patch_id": f"{TILE}_00_90", "labels": ["Urban fabric"], "split": "test"}]


def metadata(folder: Path, table: pa.Table | list[dict[str, Any]]) -> Path:
    pq.write_table(table if isinstance(table, pa.Table) else pa.Table.from_pylist(table), folder / "metadata.parquet")
    return folder / "metadata.parquet"


def test_metadata_becomes_an_index_sorted_by_id(tmp_path: Path) -> None:
    table = read_metadata(metadata(tmp_path, rows()))
    table.validate(full=True)
    assert table.schema.equals(INDEX_SCHEMA)
    assert table.to_pylist() == [
        {"id": f"{TILE}_00_90", "split": "test", "labels": [18], "paths": [f"BigEarthNet-S2/{TILE}/{TILE}_00_90"]},
        {"id": f"{TILE}_09_10", "split": "train", "labels": [1, 15], "paths": [f"BigEarthNet-S2/{TILE}/{TILE}_09_10"]},
    ]


def test_a_label_named_twice_counts_once(tmp_path: Path) -> None:
    table = read_metadata(metadata(tmp_path, rows(labels=["Pastures", "Arable land", "Pastures"])))
    assert table["labels"].to_pylist() == [[18], [1, 15]]


@pytest.mark.parametrize(
    "encode",
    [
        lambda table: table.cast(
            pa.schema(
                [
                    ("patch_id", pa.large_string()),
                    ("labels", pa.large_list(pa.large_string())),
                    ("split", pa.large_string()),
                ]
            )
        ),
        lambda table: table.set_column(2, "split", table["split"].dictionary_encode()),
        lambda table: table.select(["split", "labels", "patch_id"]),
        lambda table: table.append_column("country", pa.array(["Austria", "Finland"])),
    ],
    ids=["large strings", "categorical", "other order", "more columns"],
)
def test_metadata_rewritten_by_other_software(tmp_path: Path, encode: Callable[[pa.Table], pa.Table]) -> None:
    plain = read_metadata(metadata(tmp_path, rows()))
    assert read_metadata(metadata(tmp_path, encode(pa.Table.from_pylist(rows())))).equals(plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_id": f"{TILE}_00_90"}, rf"1 rows have a repeated patch_id, the first '{TILE}_00_90'"),
        ({"patch_id": None}, "1 rows have a malformed patch_id, the first None"),
        ({"patch_id": ""}, "malformed patch_id"),
        ({"patch_id": "../../etc"}, r"malformed patch_id, the first '\.\./\.\./etc'"),
        ({"patch_id": f"{TILE}_00_00/.."}, "malformed patch_id"),
        ({"patch_id": f"../{TILE}_00_00"}, "malformed patch_id"),
        ({"patch_id": f"{TILE}_00_00\n"}, "malformed patch_id"),
        ({"patch_id": f"{TILE}_0_0"}, "malformed patch_id"),
        ({"patch_id": "S2A_MSIL2A_20170613T101031_0_45"}, "malformed patch_id"),
        ({"patch_id": TILE.replace("33UUP", "33uup") + "_00_00"}, "malformed patch_id"),
        ({"patch_id": TILE.replace("2017", "२०१७") + "_00_00"}, "malformed patch_id"),
        ({"split": "val"}, "1 rows have an unknown split, the first 'val', expected train, validation, test"),
        ({"split": None}, "unknown split"),
        ({"labels": []}, f"1 rows have no labels, the first '{TILE}_09_10'"),
        ({"labels": None}, "1 rows have no labels"),
        ({"labels": ["Arable land", "Sea and ocean"]}, "1 rows have an unknown label, the first 'Sea and ocean'"),
        ({"labels": ["Arable land", None]}, "unknown label, the first None"),
    ],
)
def test_malformed_rows(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_metadata(metadata(tmp_path, rows(**changes)))


def test_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metadata\.parquet: column labels, split is missing"):
        read_metadata(metadata(tmp_path, pa.table({"patch_id": [f"{TILE}_00_00"]})))


def test_columns_of_another_type(tmp_path: Path) -> None:
    table = pa.table({"patch_id": [f"{TILE}_00_00"], "labels": ["Pastures"], "split": ["train"]})
    with pytest.raises(ValueError, match=r"metadata\.parquet: not BigEarthNet v2\.0 metadata"):
        read_metadata(metadata(tmp_path, table))


def test_empty_metadata(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metadata\.parquet: has no rows"):
        read_metadata(metadata(tmp_path, pa.Table.from_pylist(rows()).slice(0, 0)))


@pytest.mark.parametrize("keep", [0, 7, -5])
def test_truncated_metadata(tmp_path: Path, keep: int) -> None:
    path = metadata(tmp_path, rows())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"metadata\.parquet: not BigEarthNet v2\.0 metadata, download it again"):
        read_metadata(path)


@pytest.mark.parametrize("root", ["absent", "."])
def test_a_missing_archive_says_what_is_expected(tmp_path: Path, root: str) -> None:
    archive = BigEarthNetV2(str(tmp_path / root))
    with pytest.raises(FileNotFoundError, match=r"no BigEarthNet v2\.0 archive, expected metadata\.parquet and"):
        archive.index()
    with pytest.raises(FileNotFoundError, match=r"no BigEarthNet v2\.0 archive"):
        archive.fingerprint()


def test_metadata_without_images(tmp_path: Path) -> None:
    metadata(tmp_path, rows())
    with pytest.raises(FileNotFoundError, match="no folder BigEarthNet-S2"):
        BigEarthNetV2(str(tmp_path)).index()


def test_missing_patches_are_counted_and_the_first_is_named(archive: Path) -> None:
    index = BigEarthNetV2(str(archive)).index()
    lost = sorted([index["paths"][3].as_py()[0], *[paths[0] for paths in index["paths"].to_pylist()[10:12]]])
    for path in lost:
        shutil.rmtree(archive / path)
    (archive / lost[0]).touch()  # a file is no patch
    message = rf"metadata\.parquet names 3 patches that are not under .*, the first is {lost[0]};"
    with pytest.raises(ValueError, match=message):
        BigEarthNetV2(str(archive)).index()


def test_a_missing_tile_is_missing_patches(tmp_path: Path) -> None:
    (tmp_path / "BigEarthNet-S2").mkdir()
    with pytest.raises(ValueError, match="names 1 patches"):
        check_folders(tmp_path, pa.chunked_array([[f"BigEarthNet-S2/{TILE}/{TILE}_00_00"]]))


def test_patches_without_metadata_are_left_out(archive: Path) -> None:
    table = pq.read_table(archive / "metadata.parquet")
    pq.write_table(table.slice(0, 5), archive / "metadata.parquet")
    assert BigEarthNetV2(str(archive)).index()["id"].to_pylist() == table["patch_id"].to_pylist()[:5]


def test_fingerprint_follows_the_metadata(archive: Path) -> None:
    before = BigEarthNetV2(str(archive)).fingerprint()
    assert before == BigEarthNetV2(f"{archive}/").fingerprint()
    assert len(bytes.fromhex(before)) == 32
    table = pq.read_table(archive / "metadata.parquet")
    pq.write_table(table.slice(1), archive / "metadata.parquet")
    assert BigEarthNetV2(str(archive)).fingerprint() != before


def test_groups_hold_every_band_once_at_its_resolution() -> None:
    bands = [band for group in GROUPS for band in group.bands]
    assert sorted(bands) == sorted(["B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B11", "B12"])
    assert sum(int(np.prod(group.shape)) * 2 for group in GROUPS) == 160_000


def test_files_with_the_long_suffix(archive: Path) -> None:
    source = BigEarthNetV2(str(archive))
    path = source.index()["paths"][0].as_py()[0]
    before = read_sample(source, [path])
    for file in (archive / path).iterdir():
        file.rename(file.with_suffix(".tiff"))
    after = read_sample(source, [path])
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in before)


def test_bad_band_files_are_named(archive: Path) -> None:
    source = BigEarthNetV2(str(archive))
    path = source.index()["paths"][0].as_py()[0]
    file = next((archive / path).glob("*_B11.tif"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadRecordError, match=r"_B11\.tif: not a readable GeoTIFF"):
        read_sample(source, [path])
    shutil.copy(next((archive / path).glob("*_B02.tif")), file)
    with pytest.raises(BadRecordError, match=r"_B11\.tif: wrong size \(\(120, 120\) pixels .* expected \(60, 60\)"):
        read_sample(source, [path])
    file.unlink()
    with pytest.raises(BadRecordError, match=r"_B11\.tif: missing file"):
        read_sample(source, [path])


def test_real_patches_read_as_rasterio_reads_them(shared_data: Path) -> None:
    source = BigEarthNetV2(str(shared_data / "bigearthnet_v2"))
    paths = [paths[0] for paths in source.index()["paths"].to_pylist()]
    assert len(paths) == 30
    for path in paths:
        images = read_sample(source, [path])
        for group in GROUPS:
            image = images[group.name]
            group.check(image)
            assert image.flags.c_contiguous
            for position, band in enumerate(group.bands):
                with rasterio.open(Path(source.root, path, f"{Path(path).name}_{band}.tif")) as file:
                    np.testing.assert_array_equal(image[..., position], file.read(1))


def test_real_labels_and_splits_come_back(shared_data: Path) -> None:
    root = shared_data / "bigearthnet_v2"
    published = {row["patch_id"]: row for row in pq.read_table(root / "metadata.parquet").to_pylist()}
    for row in BigEarthNetV2(str(root)).index().to_pylist():
        assert [BIGEARTHNET_19[label] for label in row["labels"]] == sorted(published[row["id"]]["labels"])
        assert row["split"] == published[row["id"]]["split"]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("metadata.parquet", (237_871, 122_342, 119_825)),
        ("metadata_for_patches_with_snow_cloud_or_shadow.parquet", (34_673, 17_235, 17_542)),
    ],
)
def test_the_complete_official_metadata_is_accepted(shared_data: Path, name: str, counts: tuple[int, int, int]) -> None:
    path = shared_data / "bigearthnet_v2_full_metadata" / name
    table = read_metadata(path)
    assert tuple(pc.sum(pc.equal(table["split"], split)).as_py() for split in SPLITS) == counts
    published = pq.read_table(path).sort_by("patch_id")
    assert table["id"].to_pylist() == published["patch_id"].to_pylist()
    every_label = published["labels"].combine_chunks().flatten()
    assert set(every_label.to_pylist()) == set(BIGEARTHNET_19)
    # The published lists are alphabetical, so ascending indices must give the very same sequence.
    indices = table["labels"].combine_chunks()
    assert pa.array(BIGEARTHNET_19).take(indices.flatten()).equals(every_label)
    assert pc.list_value_length(indices).equals(pc.list_value_length(published["labels"].combine_chunks()))
