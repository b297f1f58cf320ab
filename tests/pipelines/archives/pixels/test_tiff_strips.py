"""Which files are copied without GDAL, and that none is that GDAL would read otherwise."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from pipelines.archives.archive import Georeference
from pipelines.archives.pixels import tiff_strips
from pipelines.archives.pixels.geotiff import read_band_into
from pipelines.archives.pixels.tiff_strips import copy_pixels, is_plain, learn
from tests.pipelines.archives.files import write_geotiff

SIZE = 60
BYTES, OUT = SIZE * SIZE * 2, np.empty((SIZE, SIZE), np.uint16)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiff_strips, "known_headers", {})


def geotiff(path: Path, *, east: float = 3e5, dtype: str = "uint16", **options: Any) -> tuple[bytes, NDArray[Any]]:
    """A file and its pixels."""
    pixels = np.random.default_rng(int(east)).integers(1, 99, (SIZE, SIZE)).astype(dtype)
    transform = rasterio.Affine(10, 0, east, 0, -10, 5e6)
    return write_geotiff(path, pixels, transform=transform, **options).read_bytes(), pixels


@pytest.fixture
def band(tmp_path: Path) -> tuple[bytes, NDArray[Any]]:
    """A plain file and its pixels."""
    return geotiff(tmp_path / "band.tif")


def plain(data: bytes, pixels: NDArray[Any] = OUT) -> bool:
    return is_plain(data[: len(data) - pixels.nbytes], pixels)


def entry(data: bytes, tag: int) -> int:
    """Where a tag's entry is."""
    (count,) = struct.unpack_from("<H", data, 8)
    return next(at for at in range(10, 10 + 12 * count, 12) if struct.unpack_from("<H", data, at) == (tag,))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"blockysize": 7}, {"blockysize": 60}, {"nodata": 0}], ids=str)
def test_plain_files(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    data, pixels = geotiff(tmp_path / "band.tif", dtype=dtype, **options)
    assert plain(data, pixels)
    assert data[-pixels.nbytes :] == pixels.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"compress": "lzw"},
        {"compress": "deflate"},
        {"tiled": True, "blockxsize": 16, "blockysize": 16},
        {"ENDIANNESS": "BIG"},
        {"BIGTIFF": "YES"},
        {"NBITS": 15},
        {"photometric": "miniswhite"},
    ],
    ids=str,
)
def test_other_files_are_left_to_gdal(tmp_path: Path, options: dict[str, Any]) -> None:
    data, pixels = geotiff(tmp_path / "band.tif", **options)
    assert not plain(data)
    learn(data, pixels, None)
    assert not copy_pixels(data, OUT)


def test_real_files_are_plain(shared_data: Path) -> None:
    sizes = {"B01": 20, "B09": 20, "B02": 120, "B03": 120, "B04": 120, "B08": 120}
    files = list(shared_data.glob("bigearthnet_v[12]/BigEarthNet-*/**/*.tif"))
    assert len(files) == 36 * 12
    for path in files:
        size = sizes.get(path.stem.rsplit("_", 1)[1], 60)
        assert plain(path.read_bytes(), np.empty((size, size), np.uint16)), path


def test_only_what_gdal_has_read_is_copied(tmp_path: Path) -> None:
    data, pixels = geotiff(tmp_path / "band.tif")
    out = np.zeros((SIZE, SIZE, 2), np.uint16)
    assert not copy_pixels(data, out[..., 1])
    assert not out.any()
    learn(data, pixels, None)
    elsewhere, other_pixels = geotiff(tmp_path / "elsewhere.tif", east=4e5)
    assert copy_pixels(elsewhere, out[..., 1])
    np.testing.assert_array_equal(out[..., 1], other_pixels)
    assert not out[..., 0].any()
    zone, _ = geotiff(tmp_path / "zone.tif")
    zone = zone.replace(struct.pack("<H", 32633), struct.pack("<H", 32634))
    assert not copy_pixels(zone, OUT)


def test_a_copied_file_lies_where_its_own_corner_says(tmp_path: Path) -> None:
    for east in (3e5, 4e5, 500123.25):
        path = tmp_path / f"{east}.tif"
        data, _ = geotiff(path, east=east)
        assert read_band_into(str(path), OUT) == Georeference(32633, east, 5e6)
        header = copy_pixels(data, OUT)  # the first file was read by GDAL, the others were copied
        assert header is not None
        assert header.georeference(data) == Georeference(32633, east, 5e6)


def test_a_corner_that_is_a_pixels_centre_is_left_to_gdal(tmp_path: Path) -> None:
    path = tmp_path / "point.tif"
    geotiff(path)
    with rasterio.open(path, "r+") as file:
        file.update_tags(AREA_OR_POINT="Point")
    data = path.read_bytes()
    assert read_band_into(str(path), OUT) == Georeference(32633, 3e5, 5e6)
    assert copy_pixels(data, OUT) is None


def test_nothing_is_learnt_where_gdal_reads_other_pixels(band: tuple[bytes, NDArray[Any]]) -> None:
    data, pixels = band
    learn(data, pixels + 1, None)
    assert not copy_pixels(data, OUT)


def test_other_bytes_sizes_and_dtypes_are_left_to_gdal(band: tuple[bytes, NDArray[Any]]) -> None:
    data, pixels = band
    learn(data, pixels, None)
    assert copy_pixels(data, OUT)
    for other in (data[:-1], data[:-48], data[:-BYTES], data + b"\0", data + bytes(48), b"", bytes(BYTES)):
        assert (plain(other), copy_pixels(other, OUT)) == (False, None)
    for out in (np.empty((30, 120), np.uint16), np.empty((60, 60), np.int16), np.empty((120, 120), np.uint8)):
        assert (plain(data, out), copy_pixels(data, out)) == (False, None)


def test_a_corner_at_the_end_of_the_header_does_not_hide_a_lost_tail(tmp_path: Path) -> None:
    """Without the header's length in the key, the last 48 bytes could be cut off and the rows would shift."""
    data, pixels = geotiff(tmp_path / "band.tif")
    place, start = entry(data, 33922), len(data) - BYTES
    (corner,) = struct.unpack_from("<I", data, place + 8)
    moved = bytearray(data[:start] + data[corner : corner + 48] + data[start:])
    struct.pack_into("<I", moved, place + 8, start)
    struct.pack_into("<I", moved, entry(data, 273) + 8, start + 48)
    moved_data = bytes(moved)
    assert plain(moved_data)
    learn(moved_data, pixels, None)
    assert copy_pixels(moved_data, OUT)
    assert not copy_pixels(moved_data[:-8], OUT)


def test_a_corner_that_covers_the_strips_is_not_left_out(tmp_path: Path) -> None:
    """Or another file could differ in its strips and still look known."""
    data, _ = geotiff(tmp_path / "band.tif", blockysize=7)
    covered = bytearray(data)
    (strips,) = struct.unpack_from("<I", data, entry(data, 273) + 8)
    for place in (strips, strips - 47, strips + 4, 100, len(data) - BYTES - 47):
        struct.pack_into("<I", covered, entry(data, 33922) + 8, place)
        assert not plain(bytes(covered))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"II", b"MM", 1),
        lambda data: data[:4] + struct.pack("<I", 9) + data[8:],
        lambda data: data[:8] + b"\xff\xff" + data[10:],
        lambda data: data[:8] + b"\0\0" + data[10:],
        lambda data: data[:10] + data[22:34] + data[10:22] + data[34:],
    ],
    ids=["big endian", "directory elsewhere", "many entries", "no entries", "unsorted"],
)
def test_damaged_directories(band: tuple[bytes, NDArray[Any]], change: Callable[[bytes], bytes]) -> None:
    assert not plain(change(band[0]))


@pytest.mark.parametrize("tag", [256, 257, 258, 259, 262, 273, 277, 278, 279, 284, 339])
@pytest.mark.parametrize(("offset", "code"), [(2, "<H"), (4, "<I"), (8, "<I")], ids=["type", "count", "value"])
def test_every_field_of_a_needed_tag_is_checked(
    band: tuple[bytes, NDArray[Any]], tag: int, offset: int, code: str
) -> None:
    data, _ = band
    at = entry(data, tag) + offset
    (value,) = struct.unpack_from(code, data, at)
    for other in {0, 1, 2, 3, 4, 8, value + 1, value - 1, 0x7FFF, 0xFFFF} - {value}:
        changed = bytearray(data)
        struct.pack_into(code, changed, at, other)
        if tag == 278 and offset == 8 and other >= SIZE:
            continue  # a strip may be said to be higher than the image
        same = offset == 2 and {value, other} == {3, 4}  # 16 and 32 bits of the same small number
        assert plain(bytes(changed)) == same


def test_unknown_tags_are_left_to_gdal(tmp_path: Path) -> None:
    data, _ = geotiff(tmp_path / "band.tif", nodata=0)
    changed = bytearray(data)
    struct.pack_into("<H", changed, entry(data, 42113), 42114)
    assert not plain(bytes(changed))


def test_the_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiff_strips, "MOST_HEADERS", 1)
    first, pixels = geotiff(tmp_path / "first.tif")
    second, _ = geotiff(tmp_path / "second.tif", nodata=0)
    learn(first, pixels, None)
    learn(second, pixels, None)
    assert copy_pixels(first, OUT)
    assert not copy_pixels(second, OUT)
