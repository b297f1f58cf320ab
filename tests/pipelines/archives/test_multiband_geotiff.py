from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from pipelines.archives.archive import BadRecordError, Georeference
from pipelines.archives.multiband_geotiff import read_bands

TRANSFORM = rasterio.Affine(10, 0, 300_000, 0, -10, 5_400_000)


def write(path: Path, pixels: NDArray[Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    bands, height, width = pixels.shape
    profile = {"driver": "GTiff", "count": bands, "height": height, "width": width, "dtype": pixels.dtype}
    with rasterio.open(path, "w", **profile, crs="EPSG:32633", transform=TRANSFORM, **options) as file:
        file.write(pixels)
    return path


def pixels(bands: int = 13, height: int = 64, width: int = 64) -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(1, 10_000, (bands, height, width), np.uint16)


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
    written = pixels()
    written[9] = 0
    image = read(write(tmp_path / "patch.tif", written, **options))
    np.testing.assert_array_equal(np.moveaxis(image, -1, 0), written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (pixels(12), "wrong number of bands .12, expected 13"),
        (pixels(13, 64, 32), r"wrong size \(\(64, 32\) pixels .* expected \(64, 64\)"),
        (pixels().astype(np.int16), "wrong dtype .int16, expected uint16"),
    ],
)
def test_files_of_another_shape(tmp_path: Path, written: NDArray[Any], message: str) -> None:
    with pytest.raises(BadRecordError, match=message):
        read(write(tmp_path / "patch.tif", written))


def test_where_the_image_lies_and_a_second_page(tmp_path: Path) -> None:
    path = write(tmp_path / "patch.tif", pixels())
    assert read_bands(path, np.zeros((64, 64, 13), np.uint16)) == Georeference(32633, 300_000, 5_400_000)
    with rasterio.open(path) as file:
        profile = file.profile
    with rasterio.open(path, "w", **(profile | {"APPEND_SUBDATASET": "YES"})) as file:
        file.write(pixels())
    with pytest.raises(BadRecordError, match="several pages"):
        read(path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match=r"absent\.tif: missing file"):
        read(tmp_path / "absent.tif")
    (tmp_path / "patch.tif").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    with pytest.raises(BadRecordError, match=r"patch\.tif: not a readable GeoTIFF"):
        read(tmp_path / "patch.tif")


def test_truncated_files(tmp_path: Path) -> None:
    complete = write(tmp_path / "complete.tif", pixels()).read_bytes()
    path = tmp_path / "truncated.tif"
    for length in [*range(0, 600, 7), *range(600, len(complete), 5000), len(complete) - 1]:
        path.write_bytes(complete[:length])
        with pytest.raises(BadRecordError, match=r"truncated\.tif: not a readable GeoTIFF"):
            read(path)


@pytest.mark.parametrize("interleave", ["pixel", "band"])
def test_blocks_that_were_never_written(tmp_path: Path, interleave: str) -> None:
    path = tmp_path / "patch.tif"
    profile = {"driver": "GTiff", "count": 13, "height": 64, "width": 64, "dtype": "uint16", "blockysize": 16}
    with rasterio.open(path, "w", **profile, transform=TRANSFORM, SPARSE_OK=True, interleave=interleave) as file:
        file.write(np.ones((13, 16, 64), np.uint16), window=((0, 16), (0, 64)))
    with pytest.raises(BadRecordError, match=r"patch\.tif: pixels missing \(block 1 of 4"):
        read(path)


def test_a_band_that_was_never_written(tmp_path: Path) -> None:
    path = tmp_path / "patch.tif"
    profile = {"driver": "GTiff", "count": 13, "height": 64, "width": 64, "dtype": "uint16", "interleave": "band"}
    with rasterio.open(path, "w", **profile, transform=TRANSFORM, SPARSE_OK=True) as file:
        file.write(np.ones((12, 64, 64), np.uint16), range(1, 13))
    with pytest.raises(BadRecordError, match=r"patch\.tif: pixels missing \(block 0 of 1, band 13"):
        read(path)


def test_a_damaged_coordinate_system(tmp_path: Path) -> None:
    content = write(tmp_path / "patch.tif", pixels()).read_bytes()
    assert b"WGS 84 / UTM zone 33N" in content
    for replacement in (bytes(21), b"\xff" * 21, b"\n" * 21):
        (tmp_path / "patch.tif").write_bytes(content.replace(b"WGS 84 / UTM zone 33N", replacement))
        try:
            image = read(tmp_path / "patch.tif")
        except BadRecordError:
            continue
        np.testing.assert_array_equal(np.moveaxis(image, -1, 0), pixels())
