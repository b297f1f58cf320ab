"""Files of archives, as several tests write and read them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from pipelines.archives.archive import INDEX_SCHEMA, Archive, ArchiveIndex, BadRecordError, read_sample
from pipelines.archives.bigearthnet.patch import GROUPS
from pipelines.archives.pixels.geotiff import read_band_into

TRANSFORM = rasterio.Affine(10, 0, 300_000, 0, -10, 5_400_000)


def write_geotiff(path: Path, pixels: NDArray[Any], **options: Any) -> Path:
    """Write pixels, `(height, width)` or `(bands, height, width)`, with a place that `options` may change."""
    pixels = pixels.reshape(-1, *pixels.shape[-2:])
    bands, height, width = pixels.shape
    profile = {"driver": "GTiff", "count": bands, "height": height, "width": width, "dtype": pixels.dtype}
    path.parent.mkdir(parents=True, exist_ok=True)
    with rasterio.open(path, "w", **(profile | {"crs": "EPSG:32633", "transform": TRANSFORM} | options)) as file:
        file.write(pixels)
    return path


def random_pixels(*shape: int) -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(1, 10_000, shape, np.uint16)


def read_band(path: Path, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    out: NDArray[Any] = np.empty(shape, dtype)
    read_band_into(str(path), out)
    return out


def valid_index(archive: Archive) -> ArchiveIndex:
    """The index of an archive, whose samples are a sound table of the common schema."""
    index = archive.index()
    index.samples.validate(full=True)
    assert index.samples.schema.equals(INDEX_SCHEMA)
    return index


def check_refused(archive: Archive, message: str, error: type[Exception] = ValueError) -> None:
    """Make sure that an archive is refused, with one line that names what is wrong."""
    with pytest.raises(error, match=message) as caught:
        archive.index()
    assert "\n" not in str(caught.value)


def check_bad_record(archive: Archive, paths: list[str], message: str) -> None:
    """Make sure that a sample is a bad record, with this reason."""
    check_bad_file(message, read_sample, archive, paths)


def check_bad_file(message: str, read: Callable[..., object], *arguments: object, **settings: object) -> None:
    """Make sure that what is read is a bad record, with this reason."""
    with pytest.raises(BadRecordError, match=message):
        read(*arguments, **settings)


def check_patch(archive: Archive, paths: list[str]) -> None:
    """Compare every band of a patch of BigEarthNet with what rasterio reads."""
    images = read_sample(archive, paths)
    for group in GROUPS:
        assert (images[group.name].shape, str(images[group.name].dtype)) == (group.shape, group.dtype)
        assert images[group.name].flags.c_contiguous
        for position, band in enumerate(group.bands):
            with rasterio.open(Path(archive.root, paths[0], f"{Path(paths[0]).name}_{band}.tif")) as file:
                np.testing.assert_array_equal(images[group.name][..., position], file.read(1))


def fill(root: Path, *paths: str, content: bytes = b"x") -> Path:
    """Make files at these paths."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def reasons(rejected: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    return [(row["id"], row["reason"]) for row in rejected]
