"""One band of one sample: a GeoTIFF with a single band."""

import itertools
import warnings
from os import PathLike
from pathlib import Path

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.errors import NotGeoreferencedWarning, RasterioError

from pipelines.archives.archive import BadRecordError


def read_band(path: str | PathLike[str], shape: tuple[int, int], dtype: str) -> NDArray[np.generic]:
    """Read the pixels of one band file, `(height, width)`, exactly as stored.

    Args:
        path: A local GeoTIFF file; its georeference is not needed and not read.
        shape: Expected `(height, width)` in pixels.
        dtype: Expected numpy name of the stored dtype.

    Raises:
        BadRecordError: The file is missing, truncated or no GeoTIFF, lacks blocks of pixels, or has another size,
            dtype or number of bands.
    """
    if not Path(path).is_file():
        raise BadRecordError(path, "missing file")
    try:
        # Without EMPTY_DIR GDAL lists the folder for sidecar files at every open.
        with rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR"), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)
            with rasterio.open(path, driver="GTiff") as source:
                _check_profile(path, source, shape, dtype)
                pixels: NDArray[np.generic] = source.read(1)
                if not pixels.all():
                    _check_blocks(path, source)
                return pixels
    except RasterioError as error:
        # Rasterio's own message only points at an earlier exception, GDAL's, which has the reason.
        reason = " ".join(str(error.__cause__ or error).split())
        raise BadRecordError(path, "not a readable GeoTIFF", reason) from error


def _check_profile(
    path: str | PathLike[str], source: rasterio.DatasetReader, shape: tuple[int, int], dtype: str
) -> None:
    if source.count != 1:
        raise BadRecordError(path, "wrong number of bands", f"{source.count}, expected 1")
    if source.shape != shape:
        raise BadRecordError(path, "wrong size", f"{source.shape} pixels (height, width), expected {shape}")
    if source.dtypes[0] != dtype:
        raise BadRecordError(path, "wrong dtype", f"{source.dtypes[0]}, expected {dtype}")


def _check_blocks(path: str | PathLike[str], source: rasterio.DatasetReader) -> None:
    """Raise where a block has no bytes in the file, as an interrupted writer leaves it: GDAL reads it as zeros."""
    block_height, block_width = source.block_shapes[0]
    rows, columns = -(-source.height // block_height), -(-source.width // block_width)
    for row, column in itertools.product(range(rows), range(columns)):
        if source.get_tag_item(f"BLOCK_OFFSET_{column}_{row}", "TIFF", bidx=1) is None:
            raise BadRecordError(path, "pixels missing", f"block {row * columns + column} of {rows * columns}")
