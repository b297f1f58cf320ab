import datetime
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rasterio

from pipelines.archives.archive import REJECTED_SCHEMA, BadRecordError, read_sample
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.bigearthnet.v2 import FLAGGED_METADATA, GROUPS, METADATA, BigEarthNetV2
from tests.pipelines.archives.files import (
    check_bad_record,
    check_patch,
    check_refused,
    reasons,
    valid_index,
    write_geotiff,
)

SEASONS = [""] + ["winter"] * 2 + ["spring"] * 3 + ["summer"] * 3 + ["autumn"] * 3 + ["winter"]


def move_out(path: Path, tmp_path: Path) -> None:
    """Leave a link to a place outside of the archive."""
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")


@pytest.fixture
def source(archive: Path) -> BigEarthNetV2:
    """A copy of the generated archive that the test may damage."""
    return BigEarthNetV2(str(archive))


@pytest.fixture
def samples(source: BigEarthNetV2) -> list[dict[str, Any]]:
    """Its samples, before it is damaged."""
    return BigEarthNetV2(source.root).index().samples.to_pylist()


@pytest.fixture
def with_sentinel1(archive: Path) -> Path:
    """The generated archive with a Sentinel-1 patch of random dB for each of its patches."""
    random = np.random.default_rng(5)
    for name in pq.read_table(archive / METADATA)["s1_name"].to_pylist():
        folder = archive / "BigEarthNet-S1" / "_".join(name.split("_")[:5]) / name
        for band in ("VH", "VV"):
            write_geotiff(folder / f"{name}_{band}.tif", random.normal(-15, 5, (120, 120)).astype(np.float32))
    return archive


def paths_of(archive: BigEarthNetV2) -> list[list[str]]:
    return archive.index().samples["paths"].to_pylist()


def flag(root: Path, count: int) -> list[str]:
    """Move the last rows of the metadata to that of the flagged patches; the ids that stay."""
    table = pq.read_table(root / METADATA)
    pq.write_table(table.slice(0, len(table) - count), root / METADATA)
    pq.write_table(table.slice(len(table) - count), root / FLAGGED_METADATA)
    return table["patch_id"].to_pylist()[:-count]


def test_the_index_of_a_whole_archive(generated: Path) -> None:
    index = valid_index(BigEarthNetV2(str(generated)))
    assert index.rejected.equals(REJECTED_SCHEMA.empty_table())
    assert index.samples.to_pylist() == [
        {
            "id": row["patch_id"],
            "split": row["split"],
            "labels": sorted(BIGEARTHNET_19.index(label) for label in row["labels"]),
            "paths": [f"BigEarthNet-S2/{row['patch_id'].rsplit('_', 2)[0]}/{row['patch_id']}"],
            "size": None,
            "country": row["country"],
            "season": SEASONS[int(row["patch_id"][15:17])],
            "tile": row["patch_id"].split("_")[5].removeprefix("T"),
            "acquisition_date": datetime.date.fromisoformat(row["patch_id"][11:19]),
            "flags": [],
        }
        for row in pq.read_table(generated / METADATA).to_pylist()
    ]


def test_flags_and_metadata_without_the_optional_columns(archive: Path) -> None:
    table = pq.read_table(archive / METADATA)
    for position, column in enumerate(("contains_seasonal_snow", "contains_cloud_or_shadow")):
        flags = pa.array([row == position for row in range(len(table))])
        table = table.set_column(table.column_names.index(column), column, flags)
    pq.write_table(table, archive / METADATA)
    samples = BigEarthNetV2(str(archive)).index().samples
    assert samples["flags"].to_pylist()[:3] == [["snow"], ["cloud_or_shadow"], []]
    pq.write_table(table.drop_columns(["country", "contains_seasonal_snow"]), archive / METADATA)
    samples = BigEarthNetV2(str(archive)).index().samples
    assert samples["flags"].null_count == samples["country"].null_count == len(samples)
    assert samples["tile"].null_count == 0


def test_where_real_patches_lie(shared_data: Path) -> None:
    archive = BigEarthNetV2(str(shared_data / "bigearthnet_v2"))
    for row in archive.index().samples.to_pylist()[:3]:
        out = {group.name: np.empty(group.shape, group.dtype) for group in archive.description.groups}
        georeference = archive.read(row["paths"], out)
        column, line = (int(part) for part in row["id"].split("_")[-2:])
        assert georeference is not None
        assert georeference.epsg == 32600 + int(row["tile"][:2])
        # A tile starts at a multiple of 60 m, 20 m less than one of 100 km; its patches follow at 1,200 m.
        assert (georeference.x0 - 1200 * column) % 100_000 in (0, 99_960, 99_980, 60_000 + 39_960)
        assert (georeference.y0 + 1200 * line) % 100_000 in (0, 20, 40)


@pytest.mark.parametrize("root", ["absent", "."])
def test_a_missing_archive_says_what_is_expected(tmp_path: Path, root: str) -> None:
    check_refused(
        BigEarthNetV2(str(tmp_path / root)),
        r"no BigEarthNet v2\.0 archive, expected metadata\.parq",
        FileNotFoundError,
    )


def test_metadata_without_images(archive: Path, source: BigEarthNetV2) -> None:
    shutil.rmtree(archive / "BigEarthNet-S2")
    check_refused(source, "no folder BigEarthNet-S2", FileNotFoundError)


def test_missing_patches_keep_their_place_and_are_unusable(
    archive: Path, source: BigEarthNetV2, samples: list[dict[str, Any]]
) -> None:
    lost = [samples[3], *samples[10:12]]
    for sample in lost:
        shutil.rmtree(archive / sample["paths"][0])
    (archive / lost[0]["paths"][0]).touch()  # a file is no patch
    index = source.index()
    assert (index.samples.to_pylist(), len(index.rejected), index.unusable.to_pylist()) == (
        samples,
        0,
        [
            {"id": row["id"], "file": f"{archive}/{row['paths'][0]}", "reason": "missing folder", "detail": ""}
            for row in lost
        ],
    )


def test_links_within_the_archive_are_followed_and_those_out_of_it_are_not(
    archive: Path, source: BigEarthNetV2, samples: list[dict[str, Any]], tmp_path: Path
) -> None:
    kept, taken = (archive / samples[place]["paths"][0] for place in (0, 1))
    kept.rename(archive / "elsewhere")
    kept.symlink_to(archive / "elsewhere")
    move_out(taken, tmp_path)
    index = source.index()
    assert (index.samples.to_pylist(), index.unusable.to_pylist()) == (
        samples,
        [{"id": taken.name, "file": str(taken), "reason": "symbolic link", "detail": ""}],
    )


@pytest.mark.parametrize(("remove", "reason"), [(shutil.rmtree, "missing folder"), (None, "symbolic link")])
def test_a_tile_that_is_missing_or_leads_out_of_the_archive_is_missing_patches(
    archive: Path, source: BigEarthNetV2, tmp_path: Path, remove: Callable[[Path], None] | None, reason: str
) -> None:
    tile = next((archive / "BigEarthNet-S2").iterdir())
    patches = sorted(path.name for path in tile.iterdir())
    remove(tile) if remove else move_out(tile, tmp_path)
    assert reasons(source.index().unusable.to_pylist()) == [(name, reason) for name in patches]


def test_images_that_lead_out_of_the_archive_are_refused(archive: Path, tmp_path: Path) -> None:
    move_out(archive / "BigEarthNet-S2", tmp_path)
    check_refused(BigEarthNetV2(str(archive)), r"BigEarthNet-S2: a symbolic link out of the archive")


def test_a_root_that_is_a_link_is_the_users_choice(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(archive)
    linked = BigEarthNetV2(str(tmp_path / "link"))
    assert linked.index().samples.equals(BigEarthNetV2(str(archive)).index().samples)
    assert read_sample(linked, paths_of(linked)[0]).keys() == {group.name for group in GROUPS}


def test_a_band_that_is_a_link_is_refused(archive: Path, source: BigEarthNetV2) -> None:
    path = paths_of(source)[0]
    file = next((archive / path[0]).glob("*_B04.tif"))
    file.rename(archive / "B04.tif")
    file.symlink_to(archive / "B04.tif")
    check_bad_record(source, path, r"_B04\.tif: symbolic link")


def test_flagged_patches_are_taken_when_asked_for(archive: Path) -> None:
    check_refused(BigEarthNetV2(str(archive), include_flagged=True), FLAGGED_METADATA, FileNotFoundError)
    everything = BigEarthNetV2(str(archive)).index()
    assert flag(archive, 7) == BigEarthNetV2(str(archive)).index().samples["id"].to_pylist()
    assert BigEarthNetV2(str(archive), include_flagged=True).index().samples.equals(everything.samples)


def test_groups_hold_every_band_once_at_its_resolution() -> None:
    bands = [band for group in GROUPS for band in group.bands]
    assert (sorted(bands), sum(int(np.prod(group.shape)) * 2 for group in GROUPS)) == (
        sorted(["B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B11", "B12"]),
        160_000,
    )


def test_files_with_the_long_suffix(archive: Path, source: BigEarthNetV2) -> None:
    path = paths_of(source)[0]
    before = read_sample(source, path)
    for file in (archive / path[0]).iterdir():
        file.rename(file.with_suffix(".tiff"))
    np.testing.assert_equal(read_sample(source, path), before)


def test_bad_band_files_are_named(archive: Path, source: BigEarthNetV2) -> None:
    path = paths_of(source)[0]
    file = next((archive / path[0]).glob("*_B11.tif"))
    whole, larger = file.read_bytes(), next((archive / path[0]).glob("*_B02.tif")).read_bytes()
    file.unlink()
    for suffix, content, message in (
        ("tif", None, "missing file"),
        ("tiff", whole[:-1], "not a readable GeoTIFF"),
        ("tif", whole[:-1], "not a readable GeoTIFF"),
        ("tif", larger, r"wrong size \(\(120, 120\) pixels .* expected \(60, 60\)"),
    ):
        if content is not None:
            file.with_suffix(f".{suffix}").write_bytes(content)
        check_bad_record(source, path, rf"_B11\.{suffix}: {message}")


def test_sentinel1_is_a_further_group_where_it_is_there(with_sentinel1: Path) -> None:
    source = BigEarthNetV2(str(with_sentinel1))
    assert source == pickle.loads(pickle.dumps(source))
    group = source.description.groups[-1]
    assert (group.name, group.shape, group.dtype, group.bands) == ("sentinel1", (120, 120, 2), "float32", ("VV", "VH"))
    index = source.index()
    assert len(index.rejected) == 0
    names = {row["patch_id"]: row["s1_name"] for row in pq.read_table(with_sentinel1 / METADATA).to_pylist()}
    for row in index.samples.to_pylist():
        name = names[row["id"]]
        assert row["paths"][1] == f"BigEarthNet-S1/{name.rsplit('_', 3)[0]}/{name}"
        image = read_sample(source, row["paths"])["sentinel1"]
        assert (image.shape, str(image.dtype)) == (group.shape, group.dtype)
        for position, band in enumerate(("VV", "VH")):
            with rasterio.open(with_sentinel1 / row["paths"][1] / f"{name}_{band}.tif") as file:
                np.testing.assert_array_equal(image[..., position], file.read(1))


def test_sentinel1_can_be_left_out_or_demanded(with_sentinel1: Path) -> None:
    without = BigEarthNetV2(str(with_sentinel1), sentinel1=False)
    assert (without.description.groups, {len(paths) for paths in paths_of(without)}) == (GROUPS, {1})
    shutil.rmtree(with_sentinel1 / "BigEarthNet-S1")
    assert BigEarthNetV2(str(with_sentinel1)).description.groups == GROUPS
    check_refused(BigEarthNetV2(str(with_sentinel1), sentinel1=True), "no folder BigEarthNet-S1", FileNotFoundError)


def test_whether_sentinel1_is_read_is_decided_once(with_sentinel1: Path) -> None:
    """A folder that is extracted while a job runs: its samples are listed without it."""
    hidden = with_sentinel1 / "hidden"
    (with_sentinel1 / "BigEarthNet-S1").rename(hidden)
    source = BigEarthNetV2(str(with_sentinel1))
    index, in_a_task = source.index(), pickle.loads(pickle.dumps(source))
    hidden.rename(with_sentinel1 / "BigEarthNet-S1")
    assert source.description.groups == in_a_task.description.groups == GROUPS
    assert set(read_sample(in_a_task, index.samples["paths"][0].as_py())) == {group.name for group in GROUPS}


def test_a_missing_sentinel1_patch_makes_a_sample_unusable(with_sentinel1: Path) -> None:
    source = BigEarthNetV2(str(with_sentinel1))
    lost = source.index().samples.to_pylist()[4]
    shutil.rmtree(with_sentinel1 / lost["paths"][1])
    index = source.index()
    assert (index.samples.to_pylist()[4], index.unusable.to_pylist()) == (
        lost,
        [{"id": lost["id"], "file": f"{with_sentinel1}/{lost['paths'][1]}", "reason": "missing folder", "detail": ""}],
    )


@pytest.mark.parametrize(("value", "reason"), [(np.nan, "NaN"), (-np.inf, "infinite value")], ids=["NaN", "infinite"])
def test_sentinel1_values_that_are_no_numbers(with_sentinel1: Path, value: float, reason: str) -> None:
    source = BigEarthNetV2(str(with_sentinel1))
    paths, pixels = paths_of(source)[0], np.full((120, 120), -10, np.float32)
    pixels[3, 5] = value
    write_geotiff(with_sentinel1 / paths[1] / f"{Path(paths[1]).name}_VH.tif", pixels)
    for _ in range(2):  # through GDAL and without it
        with pytest.raises(BadRecordError) as caught:
            read_sample(source, paths)
        assert (caught.value.file, caught.value.reason, caught.value.detail) == (
            f"{with_sentinel1}/{paths[0]}, {paths[1]}, band VH of sentinel1",
            reason,
            "1 of 14400 pixels",
        )


@pytest.mark.long
def test_real_patches_read_as_rasterio_reads_them(shared_data: Path) -> None:
    source = BigEarthNetV2(str(shared_data / "bigearthnet_v2"))
    paths = paths_of(source)
    assert len(paths) == 30
    for path in [*paths, *paths]:  # the second time without GDAL
        check_patch(source, path)


def test_bad_rows_of_the_metadata_are_in_the_index(archive: Path) -> None:
    rows: list[dict[str, Any]] = pq.read_table(archive / METADATA).to_pylist()
    rows[0]["labels"] = ["Sea and ocean"]
    rows[1]["patch_id"] = "../../etc"
    pq.write_table(pa.Table.from_pylist([*rows, rows[2]]), archive / METADATA)
    index = BigEarthNetV2(str(archive)).index()
    assert (index.samples["id"].to_pylist(), reasons(index.rejected.to_pylist())) == (
        [row["patch_id"] for row in rows[2:]],
        [
            ("../../etc", "malformed id"),
            (rows[0]["patch_id"], "unknown label"),
            (rows[2]["patch_id"], "repeated id"),
        ],
    )
