"""Reads all bands of one sample: a GeoTIFF with several bands."""

from os import PathLike
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray

from pipelines.archives.archive import BadRecordError, Georeference
from pipelines.archives.files import whole_remote
from pipelines.archives.pixels.geotiff import georeference_of, open_with_gdal
from pipelines.archives.pixels.tiff_blocks import check_block_size, check_blocks, check_one_page


def read_bands(path: str | PathLike[str], out: NDArray[Any]) -> Georeference | None:
    """Read all bands of one file into `out`, `(height, width, bands)`, exactly as stored.

    Args:
        path: Path or URL of a GeoTIFF file.
        out: Array with the file's expected size, number of bands and dtype; after an error its content is undefined.

    Returns:
        Location of the image, see `geotiff.read_band_into`.

    Raises:
        BadRecordError: The file is missing, truncated or no GeoTIFF, lacks blocks of pixels, has several pages, or
            another size, dtype or number of bands.
    """
    path = str(path)
    remote = whole_remote(path)
    with open_with_gdal(path, remote) as source:
        _check_profile(path, source, out)
        out[...] = np.moveaxis(source.read(), 0, -1)
        check_blocks(path, source, remote)
        return georeference_of(source)


def _check_profile(path: str, source: rasterio.DatasetReader, out: NDArray[Any]) -> None:
    check_one_page(path, source)
    if source.count != out.shape[2]:
        raise BadRecordError(path, "wrong number of bands", f"{source.count}, expected {out.shape[2]}")
    if source.shape != out.shape[:2]:
        raise BadRecordError(path, "wrong size", f"{source.shape} pixels (height, width), expected {out.shape[:2]}")
    if set(source.dtypes) != {out.dtype.name}:
        raise BadRecordError(path, "wrong dtype", f"{', '.join(sorted(set(source.dtypes)))}, expected {out.dtype}")
    check_block_size(path, source)
