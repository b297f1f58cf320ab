"""Code for both versions of BigEarthNet: image groups, names, and patches as folders with one GeoTIFF per band."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.archives.archive import INDEX_SCHEMA, BadRecordError, Georeference
from pipelines.archives.files import MISSING_FILE
from pipelines.archives.pixels.geotiff import read_band_into
from pipelines.sample import ImageGroup

GROUPS = (
    ImageGroup("bands_10m", (120, 120, 4), "uint16", ("B02", "B03", "B04", "B08")),
    ImageGroup("bands_20m", (60, 60, 6), "uint16", ("B05", "B06", "B07", "B8A", "B11", "B12")),
    ImageGroup("bands_60m", (20, 20, 2), "uint16", ("B01", "B09")),
)
"""Sentinel-2: reflectance x 10,000, at each band's own resolution."""
SENTINEL1 = ImageGroup("sentinel1", (120, 120, 2), "float32", ("VV", "VH"))
"""Sentinel-1: backscatter in dB."""


_SEASONS = ("winter", "spring", "summer", "autumn")
_DATE_IN_ID = (len("S2A_MSIL2A_"), len("S2A_MSIL2A_20170613"))


def dates_and_seasons(ids: pa.Array | pa.ChunkedArray) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Return the columns `acquisition_date` and `season` of patches, from the sensing time in their ids.

    Seasons are the meteorological ones of the northern hemisphere, where all patches are. Winter is December to
    February, spring March to May, summer June to August, autumn September to November.

    Args:
        ids: `S2A_MSIL2A_20170613T101031_...`; an impossible date gives nulls.
    """
    days = pc.utf8_slice_codeunits(ids, *_DATE_IN_ID)
    dates = pc.strptime(days, format="%Y%m%d", unit="s", error_is_null=True).cast(pa.date32())
    months = pc.month(dates)
    quarters = pc.divide(pc.if_else(pc.equal(months, 12), 0, months), 3)
    return {"acquisition_date": dates, "season": pc.take(pa.array(_SEASONS), quarters)}


def path_lists(folders: Sequence[pa.Array]) -> pa.ListArray:
    """Build the column `paths`, one list per row: the row's value in each of the arrays."""
    rows, columns = len(folders[0]), len(folders)
    order = np.arange(rows * columns).reshape(columns, rows).T.ravel()
    offsets = np.arange(0, rows * columns + 1, columns, dtype=np.int32)
    values = pa.concat_arrays(folders).take(pa.array(order))
    return pa.ListArray.from_arrays(offsets, values, type=INDEX_SCHEMA.field("paths").type)


def flag_lists(snow: pa.Array, cloud_or_shadow: pa.Array) -> pa.ListArray:
    """Return the column `flags` of patches; null where one of the two is unknown.

    Args:
        snow: Booleans, one per patch.
        cloud_or_shadow: Booleans, one per patch.
    """
    known = pc.and_(pc.is_valid(snow), pc.is_valid(cloud_or_shadow)).to_numpy(zero_copy_only=False)
    columns = [pc.fill_null(flag, False).to_numpy(zero_copy_only=False) for flag in (snow, cloud_or_shadow)]
    marked = np.stack(columns, axis=1) & known[:, None]
    offsets = np.concatenate([[0], np.cumsum(marked.sum(axis=1))])
    names = np.broadcast_to(np.array(["snow", "cloud_or_shadow"], object), marked.shape)[marked]
    absent = np.append(~known, False)  # a null offset makes its list null
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32(), mask=absent), pa.array(names, pa.string()), type=INDEX_SCHEMA.field("flags").type
    )


def read_patch(folder: str, groups: Sequence[ImageGroup], out: Mapping[str, NDArray[Any]]) -> Georeference | None:
    """Read `<folder>/<name of the folder>_<band>.tif`, or `.tiff`, for every band of the groups.

    Args:
        folder: Folder of the patch.
        groups: Image groups to read.
        out: One array per group, by its name; every pixel is written.

    Returns:
        Location of the patch, from its first band.

    Raises:
        BadRecordError: A band file is missing, a symbolic link, damaged, or of the wrong size or dtype.
    """
    stem = f"{folder}/{folder.rpartition('/')[2]}"
    bands = [(band, out[group.name][..., place]) for group in groups for place, band in enumerate(group.bands)]
    found = [
        _read_either_suffix(f"{stem}_{band}.tif", pixels, locate=number == 0)
        for number, (band, pixels) in enumerate(bands)
    ]
    return found[0]


def _read_either_suffix(path: str, pixels: NDArray[Any], *, locate: bool) -> Georeference | None:
    try:
        return read_band_into(path, pixels, locate=locate)
    except BadRecordError as error:
        if error.reason != MISSING_FILE:
            raise
        try:
            return read_band_into(f"{path}f", pixels, locate=locate)  # suffix in some redistributed copies
        except BadRecordError as second:
            raise (error if second.reason == MISSING_FILE else second) from None
