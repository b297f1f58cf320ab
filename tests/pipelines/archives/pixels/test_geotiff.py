import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray
from PIL import Image

from pipelines.archives.archive import BadRecordError, Georeference
from pipelines.archives.pixels.geotiff import read_band_into, without_place
from tests.pipelines.archives.files import TRANSFORM, check_bad_file, random_pixels, read_band, write_geotiff

STORED = (
    {},
    {"nodata": 0},
    {"blockysize": 1},
    {"blockysize": 7},
    {"blockysize": 200},
    {"compress": "deflate", "predictor": 2},
    {"compress": "lzw"},
    {"compress": "zstd"},
    {"compress": "packbits"},
    {"compress": "deflate", "tiled": True, "blockxsize": 32, "blockysize": 16},
    {"tiled": True, "blockxsize": 32, "blockysize": 16},
    {"ENDIANNESS": "BIG"},
    {"BIGTIFF": "YES"},
    {"photometric": "miniswhite"},
)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((dtype, options) for dtype in ("uint8", "int16", "uint16", "float32") for options in STORED),
        ("uint16", {"NBITS": 15}),
    ],
    ids=str,
)
def test_pixels_come_back_however_they_are_stored(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    written = random_pixels(60, 60).astype(dtype)
    written[:30] = 0  # whole blocks are zero, and written
    path = write_geotiff(tmp_path / "band.tif", written, **options)
    for _ in range(2):  # a plain file the second time without GDAL
        band = read_band(path, (60, 60), dtype)
        assert band.dtype == dtype
        np.testing.assert_array_equal(band, written)


@pytest.mark.parametrize("beside", ["overviews inside", "overviews beside", "mask inside", "mask beside", "scale"])
def test_what_is_stored_besides_the_pixels_does_not_change_them(tmp_path: Path, beside: str) -> None:
    written = random_pixels(120, 120)
    path = write_geotiff(tmp_path / "band.tif", written)
    options = {"TIFF_USE_OVR": beside == "overviews beside", "GDAL_TIFF_INTERNAL_MASK": beside == "mask inside"}
    with rasterio.Env(**options), rasterio.open(path, "r+") as file:
        if "overviews" in beside:
            file.build_overviews([2, 4])
        elif "mask" in beside:
            file.write_mask(np.arange(14400).reshape(120, 120) % 2 == 0)
        else:
            file.scales, file.offsets = (0.0001,), (-0.1,)
    with rasterio.open(path) as file:
        np.testing.assert_array_equal(file.read(1), written)
    for _ in range(2):
        np.testing.assert_array_equal(read_band(path, (120, 120), "uint16"), written)


def test_numbers_that_are_none_come_back_bit_by_bit(tmp_path: Path) -> None:
    written = np.array([[np.nan, -np.nan], [np.inf, -0.0]], np.float32)
    path = write_geotiff(tmp_path / "band.tif", written)
    assert [read_band(path, (2, 2), "float32").tobytes() for _ in range(2)] == [written.tobytes()] * 2


def test_a_file_without_georeference_reads_without_a_warning(tmp_path: Path) -> None:
    written = random_pixels(20, 20)
    with (
        pytest.warns(rasterio.errors.NotGeoreferencedWarning),
        rasterio.open(tmp_path / "band.tif", "w", driver="GTiff", count=1, height=20, width=20, dtype="uint16") as file,
    ):
        file.write(written, 1)
    np.testing.assert_array_equal(read_band(tmp_path / "band.tif", (20, 20), "uint16"), written)


@pytest.mark.timeout(20)
def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.tif").mkdir()
    os.mkfifo(tmp_path / "pipe.tif")
    for name in ("absent.tif", "folder.tif", "pipe.tif", "folder.tif/x.tif"):
        check_bad_file(rf"{name}: missing file", read_band, tmp_path / name, (20, 20), "uint16")
    write_geotiff(tmp_path / "band.tif", random_pixels(20, 20))
    (tmp_path / "link.tif").symlink_to(tmp_path / "band.tif")
    check_bad_file(r"link\.tif: symbolic link", read_band, tmp_path / "link.tif", (20, 20), "uint16")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (random_pixels(20, 60), r"wrong size \(\(20, 60\) pixels .* expected \(60, 20\)"),
        (random_pixels(60, 20).astype(np.int16), r"wrong dtype \(int16, expected uint16"),
        (random_pixels(3, 60, 20), r"wrong number of bands \(3, expected 1"),
        (None, "not a readable GeoTIFF"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, written: NDArray[Any] | None, message: str) -> None:
    path = tmp_path / "band.tif"
    if written is None:
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    else:
        write_geotiff(path, written)
    check_bad_file(rf"band\.tif: {message}", read_band, path, (60, 20), "uint16")


@pytest.mark.parametrize("compression", ["raw", "tiff_deflate"])
def test_a_second_page_is_a_bad_record(tmp_path: Path, compression: str) -> None:
    page, path = Image.fromarray(random_pixels(60, 60)), tmp_path / "pages.tif"
    page.save(path, save_all=True, append_images=[page], compression=compression)
    check_bad_file(r"several pages \(2, expected 1", read_band, path, (60, 60), "uint16")


@pytest.mark.parametrize("options", [{}, {"compress": "deflate"}], ids=str)
def test_where_the_image_lies(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_geotiff(tmp_path / "band.tif", random_pixels(60, 60), **options)
    # The second time without GDAL, where it can be.
    assert [read_band_into(str(path), np.empty((60, 60), np.uint16)) for _ in range(2)] == [
        Georeference(32633, 300_000, 5_400_000)
    ] * 2


def test_an_image_without_a_known_place(tmp_path: Path) -> None:
    path = tmp_path / "band.tif"
    profile = {"driver": "GTiff", "count": 1, "height": 60, "width": 60, "dtype": "uint16"}
    turned = TRANSFORM @ rasterio.Affine.rotation(30)
    for crs, transform in ((None, TRANSFORM), ("EPSG:32633", turned), ("+proj=laea +lat_0=12 +lon_0=3", TRANSFORM)):
        with rasterio.open(path, "w", **profile, crs=crs, transform=transform) as file:
            file.write(random_pixels(60, 60), 1)
        assert read_band_into(str(path), np.empty((60, 60), np.uint16)) is None


@pytest.mark.parametrize("nodata", [None, 0, 7])
def test_blocks_that_were_never_written(tmp_path: Path, nodata: int | None) -> None:
    path = tmp_path / "band.tif"
    profile = {"driver": "GTiff", "count": 1, "height": 120, "width": 120, "dtype": "uint16", "blockysize": 30}
    with rasterio.open(path, "w", **profile, nodata=nodata, transform=TRANSFORM, SPARSE_OK=True) as file:
        file.write(np.ones((30, 120), np.uint16), 1, window=((0, 30), (0, 120)))
    check_bad_file(r"band\.tif: pixels missing \(block 1 of 4", read_band, path, (120, 120), "uint16")


@pytest.mark.parametrize("size", [20, 60, 120])
def test_no_truncated_file_is_read(tmp_path: Path, size: int) -> None:
    complete = write_geotiff(tmp_path / "complete.tif", random_pixels(size, size), nodata=0).read_bytes()
    read_band(tmp_path / "complete.tif", (size, size), "uint16")  # from here on, files like it are read without GDAL
    truncated = tmp_path / "truncated.tif"
    # All of the directory and its values (under 400 bytes) in small steps, then through the strips to the last byte.
    lengths = [*range(0, 420, 3), *range(420, len(complete), len(complete) // 60), len(complete) - 1]
    for length in lengths:
        truncated.write_bytes(complete[:length])
        check_bad_file(r"truncated\.tif: not a readable GeoTIFF", read_band, truncated, (size, size), "uint16")


def test_what_is_wrong_with_a_file_is_told_in_the_same_words_wherever_it_is(tmp_path: Path) -> None:
    """A dataset is repaired where a bad record is bad for another reason than before."""
    complete = write_geotiff(tmp_path / "complete.tif", random_pixels(60, 60), nodata=0).read_bytes()
    for content in (b"no TIFF at all", complete[: len(complete) // 2]):
        details = set()
        for folder in (tmp_path / "a", tmp_path / "b", "memory://a", "memory://b", "memory://a"):
            place = f"{folder}/band.tif"
            with fsspec.open(place, "wb", auto_mkdir=True) as file:
                file.write(content)
            with pytest.raises(BadRecordError, match="not a readable GeoTIFF") as caught:
                read_band_into(place, np.empty((60, 60), np.uint16))
            details.add(caught.value.detail)
        assert len(details) == 1, details
        assert "band.tif" in details.pop()


def test_random_names_of_earlier_versions_are_no_difference() -> None:
    one, other = "4271085c-b1ab-4d54-8a0a-3f1d9a4f1f00", "ecbf924f-b1ab-4d54-8a0a-3f1d9a4f1f00"
    text = "'/vsimem/{0}/{0}.tif' not recognized; {0}.tif, band 1: IReadBlock failed at X offset 0"
    expected = "'band.tif' not recognized; band.tif, band 1: IReadBlock failed at X offset 0"
    assert {without_place(text.format(name), "s3://b/x/band.tif") for name in (one, other)} == {expected}
