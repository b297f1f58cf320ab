import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio

from pipelines.archives.archive import BadRecordError
from pipelines.archives.pixels.geotiff import open_with_gdal
from pipelines.archives.pixels.tiff_blocks import check_blocks
from tests.pipelines.archives.files import TRANSFORM, random_pixels, read_band, write_geotiff


def deflated(path: Path, bands: int = 1, **options: Any) -> Path:
    return write_geotiff(path, random_pixels(bands, 60, 60) % 200 + 1, compress="deflate", **options)


def first_byte(path: Path) -> int:
    """Where the first block begins."""
    with rasterio.open(path) as file:
        return int(file.get_tag_item("BLOCK_OFFSET_0_0", "TIFF", bidx=1))


@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("interleave", ["pixel", "band"])
@pytest.mark.parametrize(
    "options", [{}, {"blockysize": 7}, {"tiled": True, "blockxsize": 32, "blockysize": 32}], ids=str
)
def test_whole_blocks_pass(tmp_path: Path, bands: int, interleave: str, options: dict[str, Any]) -> None:
    path = deflated(tmp_path / "band.tif", bands, interleave=interleave, **options)
    with open_with_gdal(str(path)) as source:
        check_blocks(str(path), source)


@pytest.mark.long
def test_no_damaged_bit_gives_other_pixels(tmp_path: Path) -> None:
    """GDAL alone takes one of nine: where the damaged bytes inflate to more than the block, it skips the checksum."""
    path = deflated(tmp_path / "band.tif")
    whole, pixels, found = path.read_bytes(), read_band(path, (60, 60), "uint16"), 0
    for place in range(first_byte(path), len(whole), 13):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            np.testing.assert_array_equal(read_band(path, (60, 60), "uint16"), pixels)
        except BadRecordError as error:
            found += error.reason == "damaged block"
    assert found > 0


def test_a_block_that_inflates_to_less_or_much_more(tmp_path: Path) -> None:
    path = deflated(tmp_path / "band.tif")
    header = path.read_bytes()[: first_byte(path)]
    for size in (100, 1 << 28):
        stream = zlib.compress(bytes(size))
        data = bytearray(header + stream)
        struct.pack_into("<I", data, data.index(struct.pack("<HHI", 279, 4, 1)) + 8, len(stream))
        path.write_bytes(data)
        with pytest.raises(BadRecordError):
            read_band(path, (60, 60), "uint16")


def test_huge_blocks_are_refused_before_they_are_allocated(tmp_path: Path) -> None:
    path = tmp_path / "band.tif"
    profile = {"driver": "GTiff", "count": 1, "height": 20, "width": 20, "dtype": "uint16", "transform": TRANSFORM}
    options = {"tiled": True, "blockxsize": 8192, "blockysize": 8192, "SPARSE_OK": True}
    with rasterio.open(path, "w", **profile, **options):
        pass
    with pytest.raises(BadRecordError, match=r"band\.tif: wrong blocks \(of 8192 x 8192 pixels\)"):
        read_band(path, (20, 20), "uint16")
