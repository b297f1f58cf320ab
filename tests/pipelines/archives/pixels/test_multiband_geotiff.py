from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from pipelines.archives.archive import BadRecordError, Georeference
from pipelines.archives.pixels.geotiff import read_bands
from tests.pipelines.archives.files import TRANSFORM, check_bad_file, random_pixels, write_geotiff


def read(path: Path) -> NDArray[np.uint16]:
    out = np.zeros((64, 64, 13), np.uint16)
    read_bands(path, out)
    return out


@pytest.mark.parametrize(
    "options",
    [{}, {"interleave": "band"}, {"compress": "deflate"}, {"tiled": True, "blockxsize": 32, "blockysize": 32}],
    ids=["strips", "band after band", "deflate", "tiles"],
)
def test_pixels_come_back_whatever_the_blocks(tmp_path: Path, options: dict[str, Any]) -> None:
    written = random_pixels(13, 64, 64)
    written[9] = 0
    np.testing.assert_array_equal(
        np.moveaxis(read(write_geotiff(tmp_path / "patch.tif", written, **options)), -1, 0), written
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (random_pixels(12, 64, 64), "wrong number of bands .12, expected 13"),
        (random_pixels(13, 64, 32), r"wrong size \(\(64, 32\) pixels .* expected \(64, 64\)"),
        (random_pixels(13, 64, 64).astype(np.int16), "wrong dtype .int16, expected uint16"),
    ],
)
def test_files_of_another_shape(tmp_path: Path, written: NDArray[Any], message: str) -> None:
    check_bad_file(message, read, write_geotiff(tmp_path / "patch.tif", written))


def test_where_the_image_lies_and_a_second_page(tmp_path: Path) -> None:
    path = write_geotiff(tmp_path / "patch.tif", random_pixels(13, 64, 64))
    assert read_bands(path, np.zeros((64, 64, 13), np.uint16)) == Georeference(32633, 300_000, 5_400_000)
    with rasterio.open(path) as file:
        profile = file.profile
    with rasterio.open(path, "w", **(profile | {"APPEND_SUBDATASET": "YES"})) as file:
        file.write(random_pixels(13, 64, 64))
    check_bad_file("several pages", read, path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    check_bad_file(r"absent\.tif: missing file", read, tmp_path / "absent.tif")
    (tmp_path / "patch.tif").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    check_bad_file(r"patch\.tif: not a readable GeoTIFF", read, tmp_path / "patch.tif")


def test_truncated_files(tmp_path: Path) -> None:
    complete = write_geotiff(tmp_path / "complete.tif", random_pixels(13, 64, 64)).read_bytes()
    path = tmp_path / "truncated.tif"
    for length in [*range(0, 600, 7), *range(600, len(complete), 5000), len(complete) - 1]:
        path.write_bytes(complete[:length])
        check_bad_file(r"truncated\.tif: not a readable GeoTIFF", read, path)


@pytest.mark.parametrize(
    ("options", "written", "missing"),
    [
        ({"interleave": "pixel", "blockysize": 16}, (13, 16), "block 1 of 4"),
        ({"interleave": "band", "blockysize": 16}, (13, 16), "block 1 of 4"),
        ({"interleave": "band"}, (12, 64), "block 0 of 1, band 13"),
    ],
    ids=str,
)
def test_what_was_never_written(
    tmp_path: Path, options: dict[str, Any], written: tuple[int, int], missing: str
) -> None:
    path, (bands, rows) = tmp_path / "patch.tif", written
    profile = {"driver": "GTiff", "count": 13, "height": 64, "width": 64, "dtype": "uint16", "transform": TRANSFORM}
    with rasterio.open(path, "w", **profile, SPARSE_OK=True, **options) as file:
        file.write(np.ones((bands, rows, 64), np.uint16), range(1, bands + 1), window=((0, rows), (0, 64)))
    check_bad_file(rf"patch\.tif: pixels missing \({missing}", read, path)


def test_a_damaged_coordinate_system(tmp_path: Path) -> None:
    content = write_geotiff(tmp_path / "patch.tif", random_pixels(13, 64, 64)).read_bytes()
    assert b"WGS 84 / UTM zone 33N" in content
    for replacement in (bytes(21), b"\xff" * 21, b"\n" * 21):
        (tmp_path / "patch.tif").write_bytes(content.replace(b"WGS 84 / UTM zone 33N", replacement))
        try:
            image = read(tmp_path / "patch.tif")
        except BadRecordError:
            continue
        np.testing.assert_array_equal(np.moveaxis(image, -1, 0), random_pixels(13, 64, 64))
