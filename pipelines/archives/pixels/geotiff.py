"""Reads one band or all bands of one sample from a GeoTIFF file."""

import errno
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio._err import CPLE_BaseError
from rasterio.errors import NotGeoreferencedWarning, RasterioError, RasterioIOError

from pipelines.archives.archive import BadRecordError, Georeference
from pipelines.archives.files import DECODING, MISSING_FILE, read_remote, whole_remote
from pipelines.archives.pixels.tiff_blocks import check_blocks, check_profile
from pipelines.archives.pixels.tiff_strips import copy_pixels, learn
from pipelines.storage.locations import is_url

# A link could lead out of the archive, and a named pipe would block.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPEN_REASONS = {
    errno.ENOENT: MISSING_FILE,
    errno.ENOTDIR: MISSING_FILE,
    errno.EISDIR: MISSING_FILE,
    errno.ELOOP: "symbolic link",
}
# A damaged coordinate system raises a ValueError (bad characters or meaning) or GDAL's own error. Rasterio 1.3's
# RasterioIOError is not a RasterioError.
_GDAL_ERRORS = (RasterioError, RasterioIOError, CPLE_BaseError, ValueError)
_NOT_READABLE = "not a readable GeoTIFF"
_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_IN_MEMORY = re.compile(rf"(?:/vsimem/{_UUID}/)?{_UUID}(?:\.tif)?")
"""GDAL's name of a file in memory."""
_LARGEST_HEADER = 4096  # bytes; for files that are read without GDAL


def read_band_into(path: str, out: NDArray[np.generic], *, locate: bool = True) -> Georeference | None:
    """Read the pixels of one band file into `out`, which may be one band of an image: `image[..., band]`.

    Args:
        path: Path or URL of a GeoTIFF file.
        out: `(height, width)`, with the file's expected size and dtype; after an error its content is undefined.
        locate: Whether to return the location; one band of a sample is enough.

    Returns:
        Location of the image. None without `locate`, or if the file names no coordinate reference system by its code.

    Raises:
        BadRecordError: The file is missing, a symbolic link, truncated or not a GeoTIFF. Or it lacks blocks of pixels,
            has several pages, or another size, dtype or number of bands.
    """
    limit = out.nbytes + _LARGEST_HEADER
    data = read_file(path, limit)
    complete = len(data) < limit
    if complete and (header := copy_pixels(data, out)) is not None:
        return header.georeference(data) if locate else None
    (pixels,), georeference = _read_with_gdal(path, (1, *out.shape), out.dtype.name, data if complete else None)
    if complete:
        learn(data, pixels, georeference)
    out[...] = pixels
    return georeference if locate else None


def read_bands(path: str | PathLike[str], out: NDArray[Any]) -> Georeference | None:
    """Read all bands of one file into `out`, `(height, width, bands)`, exactly as stored.

    Args:
        path: Path or URL of a GeoTIFF file.
        out: Array with the file's expected size, number of bands and dtype; after an error its content is undefined.

    Returns:
        Location of the image, see `read_band_into`.

    Raises:
        BadRecordError: The file is missing, truncated or no GeoTIFF, lacks blocks of pixels, has several pages, or
            another size, dtype or number of bands.
    """
    pixels, georeference = _read_with_gdal(str(path), (out.shape[2], *out.shape[:2]), out.dtype.name, None)
    out[...] = np.moveaxis(pixels, 0, -1)
    return georeference


def _read_with_gdal(
    path: str, shape: tuple[int, ...], dtype: str, data: bytes | None
) -> tuple[NDArray[np.generic], Georeference | None]:
    """Return the pixels, `(bands, height, width)`, and the location of an image with this shape and dtype."""
    remote = whole_remote(path, data)
    with open_with_gdal(path, remote) as source:
        check_profile(path, source, shape, dtype)
        pixels: NDArray[np.generic] = source.read()
        check_blocks(path, source, remote)
        return pixels, georeference_of(source)


def read_file(path: str, limit: int) -> bytes:
    """Read at most the first `limit` bytes of a file of the archive.

    Raises:
        BadRecordError: The file is missing, a symbolic link, or cannot be read.
    """
    if is_url(path):
        return read_remote(path, limit)
    try:
        with open(path, "rb", buffering=0, opener=lambda name, _: os.open(name, _OPEN_FLAGS)) as file:
            return os.read(file.fileno(), limit)
    except OSError as error:
        reason = _OPEN_REASONS.get(error.errno or 0, "unreadable file")
        raise BadRecordError(path, reason, error.strerror or "") from error


def georeference_of(source: rasterio.DatasetReader) -> Georeference | None:
    """Return the location of an opened image; None if it is rotated, or its coordinate system has no EPSG code.

    Args:
        source: The image; its affine transform maps the outer corner of the upper left pixel to `(x0, y0)`.
    """
    epsg = source.crs.to_epsg() if source.crs else None
    transform = source.transform
    is_rotated = transform.b or transform.d
    return None if epsg is None or is_rotated else Georeference(epsg, transform.c, transform.f)


@contextmanager
def open_with_gdal(path: str, data: bytes | None = None) -> Iterator[rasterio.DatasetReader]:
    """Open a GeoTIFF file of the archive; GDAL's errors on opening and reading become bad records.

    Args:
        path: Path of a local file; or the name of the file in `data`.
        data: All bytes of a remote file.

    Raises:
        BadRecordError: The file is missing, or GDAL cannot read it.
    """
    if data is None and not Path(path).is_file():
        raise BadRecordError(path, MISSING_FILE, "no regular file")
    if data == b"":  # rasterio would open it for writing
        raise BadRecordError(path, _NOT_READABLE, "empty file")
    try:
        # Without EMPTY_DIR GDAL lists the folder for sidecar files at every open.
        with (
            DECODING,
            rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR"),
            warnings.catch_warnings(action="ignore", category=NotGeoreferencedWarning),
            nullcontext() if data is None else rasterio.MemoryFile(data) as memory,
            rasterio.open(path, driver="GTiff") if memory is None else memory.open(driver="GTiff") as source,
        ):
            yield source
    except BadRecordError:
        raise
    except _GDAL_ERRORS as error:
        # Rasterio's own message only refers to GDAL's earlier exception, which contains the reason.
        reason = " ".join(str(error.__cause__ or error).split())
        raise BadRecordError(path, _NOT_READABLE, without_place(reason, path)) from error


def without_place(detail: str, path: str) -> str:
    """Replace a file's path in GDAL's message by its last name; GDAL uses a random path for each read of a remote file.

    Args:
        detail: GDAL's message.
        path: Path or URL of the file.
    """
    name = path.rpartition("/")[2]
    return _IN_MEMORY.sub(lambda _: name, detail.replace(path, name))
