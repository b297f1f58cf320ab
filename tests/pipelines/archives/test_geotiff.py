from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from pipelines.archives.archive import BadRecordError
from pipelines.archives.geotiff import read_band

TRANSFORM = rasterio.Affine(10, 0, 300_000, 0, -10, 5_400_000)


def write(path: Path, pixels: NDArray[Any], **options: Any) -> Path:
    bands, height, width = pixels.shape
    profile = {"driver": "GTiff", "count": bands, "height": height, "width": width, "dtype": pixels.dtype}
    with rasterio.open(path, "w", **profile, crs="EPSG:32633", transform=TRANSFORM, **options) as file:
        file.write(pixels)
    return path


def pixels(height: int, width: int) -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(1, 10_000, (1, height, width), np.uint16)


@pytest.mark.parametrize(
    "options",
    [{}, {"compress": "deflate"}, {"tiled": True, "blockxsize": 32, "blockysize": 16}, {"blockysize": 7}],
    ids=["strips", "deflate", "tiles", "strips of 7"],
)
def test_pixels_come_back_whatever_the_blocks(tmp_path: Path, options: dict[str, Any]) -> None:
    written = pixels(60, 60)
    written[0, 3, 5] = 0
    band = read_band(write(tmp_path / "band.tif", written, **options), (60, 60), "uint16")
    assert band.dtype == np.uint16
    np.testing.assert_array_equal(band, written[0])


def test_written_zeros_are_pixels(tmp_path: Path) -> None:
    band = read_band(write(tmp_path / "band.tif", np.zeros((1, 120, 120), np.uint16)), (120, 120), "uint16")
    assert not band.any()


def test_a_file_without_georeference_reads_without_a_warning(tmp_path: Path) -> None:
    written = pixels(20, 20)
    with (
        pytest.warns(rasterio.errors.NotGeoreferencedWarning),
        rasterio.open(tmp_path / "band.tif", "w", driver="GTiff", count=1, height=20, width=20, dtype="uint16") as file,
    ):
        file.write(written)
    np.testing.assert_array_equal(read_band(tmp_path / "band.tif", (20, 20), "uint16"), written[0])


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match=r"absent\.tif: missing file"):
        read_band(tmp_path / "absent.tif", (20, 20), "uint16")


def test_another_format_under_the_name_of_a_geotiff(tmp_path: Path) -> None:
    (tmp_path / "band.tif").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    with pytest.raises(BadRecordError, match=r"band\.tif: not a readable GeoTIFF"):
        read_band(tmp_path / "band.tif", (20, 20), "uint16")


def test_another_size(tmp_path: Path) -> None:
    path = write(tmp_path / "band.tif", pixels(20, 60))
    with pytest.raises(BadRecordError, match=r"band\.tif: wrong size \(\(20, 60\) pixels .* expected \(60, 20\)"):
        read_band(path, (60, 20), "uint16")


def test_another_dtype(tmp_path: Path) -> None:
    path = write(tmp_path / "band.tif", pixels(20, 20).astype(np.int16))
    with pytest.raises(BadRecordError, match=r"band\.tif: wrong dtype \(int16, expected uint16"):
        read_band(path, (20, 20), "uint16")


def test_several_bands(tmp_path: Path) -> None:
    path = write(tmp_path / "band.tif", np.ones((3, 20, 20), np.uint16))
    with pytest.raises(BadRecordError, match=r"band\.tif: wrong number of bands \(3, expected 1"):
        read_band(path, (20, 20), "uint16")


def test_blocks_that_were_never_written(tmp_path: Path) -> None:
    path = tmp_path / "band.tif"
    profile = {"driver": "GTiff", "count": 1, "height": 120, "width": 120, "dtype": "uint16", "blockysize": 30}
    with rasterio.open(path, "w", **profile, transform=TRANSFORM, SPARSE_OK=True) as file:
        file.write(np.ones((30, 120), np.uint16), 1, window=((0, 30), (0, 120)))
    with pytest.raises(BadRecordError, match=r"band\.tif: pixels missing \(block 1 of 4"):
        read_band(path, (120, 120), "uint16")


@pytest.mark.parametrize("size", [20, 60, 120])
def test_no_truncated_file_is_read(tmp_path: Path, size: int) -> None:
    complete = write(tmp_path / "complete.tif", pixels(size, size), nodata=0).read_bytes()
    truncated = tmp_path / "truncated.tif"
    # All of the directory and its values (under 400 bytes) in small steps, then through the strips to the last byte.
    lengths = [*range(0, 420, 3), *range(420, len(complete), len(complete) // 60), len(complete) - 1]
    for length in lengths:
        truncated.write_bytes(complete[:length])
        with pytest.raises(BadRecordError, match=r"truncated\.tif: not a readable GeoTIFF"):
            read_band(truncated, (size, size), "uint16")
