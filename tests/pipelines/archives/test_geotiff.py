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
from pipelines.archives.geotiff import read_band_into, without_place

TRANSFORM = rasterio.Affine(10, 0, 300_000, 0, -10, 5_400_000)


def write(path: Path, pixels: NDArray[Any], **options: Any) -> Path:
    bands, height, width = pixels.shape
    profile = {"driver": "GTiff", "count": bands, "height": height, "width": width, "dtype": pixels.dtype}
    with rasterio.open(path, "w", **profile, crs="EPSG:32633", transform=TRANSFORM, **options) as file:
        file.write(pixels)
    return path


def pixels(height: int, width: int) -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(1, 10_000, (1, height, width), np.uint16)


def read_band(path: Path, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    out: NDArray[Any] = np.empty(shape, dtype)
    read_band_into(str(path), out)
    return out


@pytest.mark.parametrize(
    "options",
    [
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
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "float32"])
def test_pixels_come_back_however_they_are_stored(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    written = pixels(60, 60).astype(dtype)
    written[0, 3, 5] = 0
    path = write(tmp_path / "band.tif", written, **options)
    for _ in range(2):  # a plain file the second time without GDAL
        band = read_band(path, (60, 60), dtype)
        assert band.dtype == dtype
        np.testing.assert_array_equal(band, written[0])


@pytest.mark.parametrize("beside", ["overviews inside", "overviews beside", "mask inside", "mask beside", "scale"])
def test_what_is_stored_besides_the_pixels_does_not_change_them(tmp_path: Path, beside: str) -> None:
    written = pixels(120, 120)
    path = write(tmp_path / "band.tif", written)
    options = {"TIFF_USE_OVR": beside == "overviews beside", "GDAL_TIFF_INTERNAL_MASK": beside == "mask inside"}
    with rasterio.Env(**options), rasterio.open(path, "r+") as file:
        if "overviews" in beside:
            file.build_overviews([2, 4])
        elif "mask" in beside:
            file.write_mask(np.arange(14400).reshape(120, 120) % 2 == 0)
        else:
            file.scales, file.offsets = (0.0001,), (-0.1,)
    with rasterio.open(path) as file:
        np.testing.assert_array_equal(file.read(1), written[0])
    for _ in range(2):
        np.testing.assert_array_equal(read_band(path, (120, 120), "uint16"), written[0])


def test_fewer_bits_than_the_dtype(tmp_path: Path) -> None:
    written = pixels(60, 60)
    path = write(tmp_path / "band.tif", written, NBITS=15)
    for _ in range(2):
        np.testing.assert_array_equal(read_band(path, (60, 60), "uint16"), written[0])


def test_a_band_of_an_image_is_read_in_place(tmp_path: Path) -> None:
    image = np.zeros((60, 60, 3), np.uint16)
    for change in range(2):  # with GDAL, then without
        written = pixels(60, 60) + np.uint16(change)
        write(tmp_path / "band.tif", written)
        read_band_into(str(tmp_path / "band.tif"), image[..., 1])
        np.testing.assert_array_equal(image[..., 1], written[0])
    assert not image[..., [0, 2]].any()


def test_numbers_that_are_none_come_back_bit_by_bit(tmp_path: Path) -> None:
    written = np.array([[[np.nan, -np.nan], [np.inf, -0.0]]], np.float32)
    path = write(tmp_path / "band.tif", written)
    for _ in range(2):
        assert read_band(path, (2, 2), "float32").tobytes() == written.tobytes()


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


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "band.tif", pixels(20, 20))
    (tmp_path / "link.tif").symlink_to(tmp_path / "band.tif")
    with pytest.raises(BadRecordError, match=r"link\.tif: symbolic link"):
        read_band(tmp_path / "link.tif", (20, 20), "uint16")


@pytest.mark.timeout(20)
def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.tif").mkdir()
    os.mkfifo(tmp_path / "pipe.tif")
    for name in ("folder.tif", "pipe.tif", "folder.tif/x.tif"):
        with pytest.raises(BadRecordError, match=rf"{name}: missing file"):
            read_band(tmp_path / name, (20, 20), "uint16")


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


@pytest.mark.parametrize("beside", [{}, {"compress": "deflate"}], ids=str)
def test_a_second_page_is_a_bad_record(tmp_path: Path, beside: dict[str, Any]) -> None:
    first, second = (
        Image.fromarray(page[0].astype(np.int32).astype(np.uint16)) for page in (pixels(60, 60), pixels(60, 60))
    )
    path = tmp_path / "pages.tif"
    compression = "tiff_deflate" if beside else "raw"
    first.save(path, save_all=True, append_images=[second], compression=compression)
    with pytest.raises(BadRecordError, match=r"several pages \(2, expected 1"):
        read_band(path, (60, 60), "uint16")


@pytest.mark.parametrize("options", [{}, {"compress": "deflate"}], ids=str)
def test_where_the_image_lies(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write(tmp_path / "band.tif", pixels(60, 60), **options)
    for _ in range(2):  # the second time without GDAL, where it can be
        assert read_band_into(str(path), np.empty((60, 60), np.uint16)) == Georeference(32633, 300_000, 5_400_000)


def test_an_image_without_a_known_place(tmp_path: Path) -> None:
    path = tmp_path / "band.tif"
    profile = {"driver": "GTiff", "count": 1, "height": 60, "width": 60, "dtype": "uint16"}
    turned = TRANSFORM @ rasterio.Affine.rotation(30)
    for crs, transform in ((None, TRANSFORM), ("EPSG:32633", turned), ("+proj=laea +lat_0=12 +lon_0=3", TRANSFORM)):
        with rasterio.open(path, "w", **profile, crs=crs, transform=transform) as file:
            file.write(pixels(60, 60))
        assert read_band_into(str(path), np.empty((60, 60), np.uint16)) is None


@pytest.mark.parametrize("nodata", [None, 0, 7])
def test_blocks_that_were_never_written(tmp_path: Path, nodata: int | None) -> None:
    path = tmp_path / "band.tif"
    profile = {"driver": "GTiff", "count": 1, "height": 120, "width": 120, "dtype": "uint16", "blockysize": 30}
    with rasterio.open(path, "w", **profile, nodata=nodata, transform=TRANSFORM, SPARSE_OK=True) as file:
        file.write(np.ones((30, 120), np.uint16), 1, window=((0, 30), (0, 120)))
    with pytest.raises(BadRecordError, match=r"band\.tif: pixels missing \(block 1 of 4"):
        read_band(path, (120, 120), "uint16")


@pytest.mark.parametrize("size", [20, 60, 120])
def test_no_truncated_file_is_read(tmp_path: Path, size: int) -> None:
    complete = write(tmp_path / "complete.tif", pixels(size, size), nodata=0).read_bytes()
    read_band(tmp_path / "complete.tif", (size, size), "uint16")  # from here on, files like it are read without GDAL
    truncated = tmp_path / "truncated.tif"
    # All of the directory and its values (under 400 bytes) in small steps, then through the strips to the last byte.
    lengths = [*range(0, 420, 3), *range(420, len(complete), len(complete) // 60), len(complete) - 1]
    for length in lengths:
        truncated.write_bytes(complete[:length])
        with pytest.raises(BadRecordError, match=r"truncated\.tif: not a readable GeoTIFF"):
            read_band(truncated, (size, size), "uint16")


def test_what_is_wrong_with_a_file_is_told_in_the_same_words_wherever_it_is(tmp_path: Path) -> None:
    """A dataset is repaired where a bad record is bad for another reason than before."""
    complete = write(tmp_path / "complete.tif", pixels(60, 60), nodata=0).read_bytes()
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
