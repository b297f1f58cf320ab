"""Damaged GeoTIFF files: each is refused, or reads as GDAL reads it.

GROUNDSWELL_FUZZ_VARIANTS sets how many variants are tried, GROUNDSWELL_FUZZ_SEED which ones.
"""

import os
import resource
import struct
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from pipelines.archives.archive import BadRecordError
from pipelines.archives.geotiff import read_band_into
from pipelines.archives.tiff_strips import is_plain

VARIANTS = int(os.environ.get("GROUNDSWELL_FUZZ_VARIANTS", "600"))
SEED = int(os.environ.get("GROUNDSWELL_FUZZ_SEED", "0"))
MEMORY_MIB = 512  # no damaged size may be believed
HEADER = 420  # bytes that hold the directory and its values
EXTREMES = (0, 1, 2, 3, 7, 8, 16, 120, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)
TAGS = (254, 256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284, 317, 322, 323, 324, 325, 330, 338, 339, 347, 33922)

Sample = tuple[bytes, tuple[int, int], str]


def read_band(path: Path, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    out: NDArray[Any] = np.empty(shape, dtype)
    read_band_into(str(path), out)
    return out


def generated_samples(folder: Path) -> list[Sample]:
    """What GDAL writes in several ways, each as (bytes, shape, dtype)."""
    random = np.random.default_rng(1)
    samples = []
    for number, (size, dtype, options) in enumerate(
        [
            (120, "uint16", {"nodata": 0}),
            (60, "uint16", {}),
            (20, "uint16", {"blockysize": 7}),
            (120, "float32", {}),
            (20, "uint8", {}),
            (60, "uint16", {"compress": "deflate", "predictor": 2}),
            (60, "uint16", {"compress": "lzw", "tiled": True, "blockxsize": 32, "blockysize": 32}),
            (60, "uint16", {"BIGTIFF": "YES"}),
            (60, "uint16", {"ENDIANNESS": "BIG"}),
        ]
    ):
        pixels = random.integers(1, 200, (1, size, size)).astype(dtype)
        profile = {"driver": "GTiff", "count": 1, "height": size, "width": size, "dtype": dtype, "crs": "EPSG:32633"}
        path = folder / f"sample_{number}.tif"
        with rasterio.open(path, "w", **profile, transform=rasterio.Affine(10, 0, 3e5, 0, -10, 5e6), **options) as file:
            file.write(pixels)
        samples.append((path.read_bytes(), (size, size), dtype))
    return samples


def real_samples(data: Path) -> list[Sample]:
    """The bands of two patches of each BigEarthNet version."""
    sizes = {"B01": 20, "B09": 20, "B02": 120, "B03": 120, "B04": 120, "B08": 120}
    patches = [*sorted(data.glob("bigearthnet_v2/*/*/S2*"))[:2], *sorted(data.glob("bigearthnet_v1/*/S2*"))[:2]]
    samples = []
    for path in (path for patch in patches for path in sorted(patch.glob("*.tif"))):
        size = sizes.get(path.stem.rsplit("_", 1)[1], 60)
        samples.append((path.read_bytes(), (size, size), "uint16"))
    return samples


def damaged(original: bytes, random: np.random.Generator) -> bytes:
    """One to four kinds of damage at once; most of it to what describes the pixels."""
    data = bytearray(original)
    for _ in range(random.integers(1, 5)):
        kind = random.integers(0, 9)
        place = int(random.integers(0, max(1, min(len(data), HEADER) if random.random() < 0.7 else len(data))))
        if kind == 0:
            data[place : place + 1] = bytes([random.integers(256)])
        elif kind == 1 and data:
            data[min(place, len(data) - 1)] ^= 1 << int(random.integers(8))
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            data += random.bytes(int(random.integers(1, 5000)))
        elif kind == 4:
            other, size = int(random.integers(0, len(data) + 1)), int(random.integers(1, 300))
            data[place : place + size], data[other : other + size] = (
                data[other : other + size],
                data[place : place + size],
            )
        elif kind == 5:
            data[place : place + 4] = struct.pack("<I", random.choice(EXTREMES))
        elif kind == 6:
            del data[place : place + int(random.integers(1, 40))]
        elif kind == 7:
            data[place:place] = random.bytes(int(random.integers(1, 40)))
        elif len(data) > 200:
            # One field of one entry: its tag, type, count or value.
            entry = 10 + 12 * int(random.integers(0, 16))
            field = random.integers(4)
            if field == 0:
                data[entry : entry + 2] = struct.pack("<H", random.choice(TAGS))
            elif field == 1:
                data[entry + 2 : entry + 4] = struct.pack("<H", random.integers(0, 19))
            else:
                at = entry + (4 if field == 2 else 8)
                data[at : at + 4] = struct.pack("<I", random.choice(EXTREMES))
    return bytes(data)


def gdal_pixels(path: Path) -> NDArray[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path, driver="GTiff") as file:
            pixels: NDArray[Any] = file.read(1)
            return pixels


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.timeout(60 + VARIANTS // 20)
@pytest.mark.parametrize("source", ["generated", "real"])
def test_no_damaged_file_reads_otherwise_than_gdal_reads_it(
    source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    samples = real_samples(request.getfixturevalue("shared_data")) if source == "real" else generated_samples(tmp_path)
    path = tmp_path / "band.tif"
    for data, shape, dtype in samples:  # so that undamaged headers are known, and damaged pixels under them copied
        path.write_bytes(data)
        np.testing.assert_array_equal(read_band(path, shape, dtype), gdal_pixels(path))
    random = np.random.default_rng(SEED)
    before = peak_mib()
    outcomes: Counter[str] = Counter()
    for number in range(VARIANTS // 2):
        original, shape, dtype = samples[number % len(samples)]
        data = damaged(original, random)
        path.write_bytes(data)
        try:
            pixels = read_band(path, shape, dtype)
        except BadRecordError as error:
            outcomes[error.reason] += 1
            continue
        plain = is_plain(data[: len(data) - pixels.nbytes], pixels)
        outcomes["read, plain" if plain else "read"] += 1
        expected = gdal_pixels(path)
        assert pixels.tobytes() == expected.tobytes(), f"variant {number} of seed {SEED}"
        if plain:
            assert data[len(data) - pixels.nbytes :] == expected.tobytes(), f"variant {number} of seed {SEED}"
    print(source, dict(outcomes))
    assert outcomes["read, plain"] > VARIANTS // 100
    assert outcomes["not a readable GeoTIFF"] > VARIANTS // 100
    assert peak_mib() - before < MEMORY_MIB
