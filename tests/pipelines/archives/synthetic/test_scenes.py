from pathlib import Path

import pyarrow.parquet as pq
import rasterio

from pipelines.archives.synthetic.scenes import CAPACITY, SCENES, patch


def test_names_are_padded_as_published() -> None:
    first = patch(len(SCENES) * 7)
    assert (first.id, first.s2v1_name, first.s1_name) == (
        "S2A_MSIL2A_20170608T112121_N9999_R037_T29SNB_00_07",
        "S2A_MSIL2A_20170608T112121_0_7",
        "S1A_IW_GRDH_1SDV_20170608T060000_29SNB_0_7",
    )
    assert (first.west, first.north) == (499_980, 4_200_000 - 7 * 1200)


def test_every_number_has_its_own_place() -> None:
    ids = [patch(number).id for number in range(CAPACITY)]
    assert len(set(ids)) == CAPACITY == len(SCENES) * 91 * 91
    assert ids[-1].endswith("_90_90")


def test_no_invented_patch_is_a_real_one(shared_data: Path) -> None:
    folder = shared_data / "bigearthnet_v2_full_metadata"
    real = {name for path in folder.glob("*.parquet") for name in pq.read_table(path)["patch_id"].to_pylist()}
    assert len(real) == 549_488
    assert not {name.rsplit("_", 2)[0] for name in real} & {scene.name for scene in SCENES}


def test_places_agree_with_real_files_of_the_same_tiles(shared_data: Path) -> None:
    corners, compared = {scene.name.rsplit("_", 1)[1]: scene for scene in SCENES}, 0
    for path in (shared_data / "bigearthnet_v2").glob("BigEarthNet-S2/*/*/*_B02.tif"):
        *_, tile, column, row, _ = path.stem.split("_")
        if tile in corners:
            with rasterio.open(path) as file:
                scene = corners[tile]
                assert (file.crs.to_epsg(), file.transform.c, file.transform.f) == (
                    scene.epsg,
                    scene.west + int(column) * 1200,
                    scene.north - int(row) * 1200,
                )
                compared += 1
    assert compared > 0
