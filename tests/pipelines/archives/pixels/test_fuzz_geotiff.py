"""Damaged GeoTIFF files: each is refused, or reads as GDAL reads it.

GROUNDSWELL_FUZZ_VARIANTS sets how many variants are tried, GROUNDSWELL_FUZZ_SEED which ones.
"""

import os
import resource
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from pipelines.archives.archive import BadRecordError
from pipelines.archives.pixels.tiff_strips import is_plain
from tests.pipelines.archives.files import read_band, write_geotiff
from tests.pipelines.archives.pixels.damage import damaged

VARIANTS = int(os.environ.get("GROUNDSWELL_FUZZ_VARIANTS", "600"))
SEED = int(os.environ.get("GROUNDSWELL_FUZZ_SEED", "0"))
MEMORY_MIB = 512  # no damaged size may be believed
Sample = tuple[bytes, tuple[int, int], str]


def generated_samples(folder: Path) -> list[Sample]:
    """What GDAL writes in several ways, each as (bytes, shape, dtype)."""
    random, samples = np.random.default_rng(1), []
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
        pixels = random.integers(1, 200, (size, size)).astype(dtype)
        samples.append(
            (write_geotiff(folder / f"sample_{number}.tif", pixels, **options).read_bytes(), (size, size), dtype)
        )
    return samples


def real_samples(data: Path) -> list[Sample]:
    """The bands of two patches of each BigEarthNet version."""
    sizes = {"B01": 20, "B09": 20, "B02": 120, "B03": 120, "B04": 120, "B08": 120}
    patches = [*sorted(data.glob("bigearthnet_v2/*/*/S2*"))[:2], *sorted(data.glob("bigearthnet_v1/*/S2*"))[:2]]
    paths = [path for patch in patches for path in sorted(patch.glob("*.tif"))]
    return [(path.read_bytes(), (sizes.get(path.stem.rsplit("_", 1)[1], 60),) * 2, "uint16") for path in paths]


def gdal_pixels(path: Path) -> NDArray[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path, driver="GTiff") as file:
            return file.read(1)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.long
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
    random, before = np.random.default_rng(SEED), peak_mib()
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
