"""Patches on the ground: their places, their size in metres, and the cells of a grid that they cover."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rasterio.warp import transform

from pipelines.sample import ImageGroup

_METRES = {
    **dict.fromkeys(("B02", "B03", "B04", "B08"), 10),
    **dict.fromkeys(("B05", "B06", "B07", "B8A", "B11", "B12"), 20),
    **dict.fromkeys(("B01", "B09", "B10"), 60),
}
"""Ground sampling distance of Sentinel-2's bands."""
_LARGEST_SIDE = 20_000  # cells of a GeoTIFF
_PARTS = (12, 6, 4, 3, 2, 1)  # cells of a GeoTIFF along a patch


@dataclass(frozen=True)
class GroundPredictions:
    """The likeliest class of every patch with a known location."""

    class_names: tuple[str, ...]
    table: pa.Table
    """Some columns of `write.PREDICTION_SCHEMA`."""
    likeliest: NDArray[np.int64]
    """Class indices, `(rows,)`."""
    metres: float
    """Side of a patch in metres."""
    unplaced: int
    """Number of predictions whose images have no location."""

    @property
    def corners(self) -> NDArray[np.float64]:
        """Left and upper edge of each patch, `(rows, 2)`, in the units of its coordinate system."""
        return np.stack([self.table["x0"].to_numpy(), self.table["y0"].to_numpy()], axis=1)

    @property
    def systems(self) -> NDArray[np.int32]:
        """EPSG code of each patch, `(rows,)`."""
        return np.asarray(self.table["epsg"].to_numpy())

    def of(self, code: int) -> "GroundPredictions":
        """Return the patches of one coordinate system."""
        chosen = self.systems == code
        return replace(self, table=self.table.filter(pa.array(chosen)), likeliest=self.likeliest[chosen])


def patch_metres(groups: Sequence[ImageGroup]) -> float:
    """Return the side of a patch on the ground, from its size in pixels and the resolution of Sentinel-2's bands.

    Raises:
        ValueError: No group has only Sentinel-2 bands of one resolution and square images.
    """
    for group in groups:
        distances = {_METRES.get(band) for band in group.bands}
        (distance,) = distances if len(distances) == 1 else (None,)
        if distance is not None and group.shape[0] == group.shape[1]:
            return float(distance * group.shape[0])
    names = ", ".join(band for group in groups for band in group.bands)
    raise ValueError(f"--map needs bands of Sentinel-2, whose pixels have a known size; there are {names}")


def rings_of(corners: NDArray[np.float64], systems: NDArray[np.int32], metres: float) -> NDArray[np.float64]:
    """Return the outlines of patches in longitude and latitude, anticlockwise, `(rows, 5, 2)`."""
    offsets = np.array([[0, 0], [0, -1], [1, -1], [1, 0], [0, 0]]) * metres
    rings = np.empty((len(corners), *offsets.shape))
    for code in np.unique(systems).tolist():
        rows = np.flatnonzero(systems == code)
        points = (corners[rows, np.newaxis] + offsets).reshape(-1, 2)
        placed = transform(f"EPSG:{code}", "EPSG:4326", points[:, 0], points[:, 1])
        rings[rows] = np.round(np.stack(placed, axis=1), 7).reshape(len(rows), *offsets.shape)
    return rings


def cell_of(found: GroundPredictions, file: Path) -> float:
    """Return the side of a GeoTIFF's cells in metres, so that every patch has its exact location.

    A cell is a patch, or a part of it if the patches of several tiles do not lie on one grid of their size. The origins
    of Sentinel-2 tiles are 99,960 or 100,020 m apart, which is not a multiple of BigEarthNet's 1,200 m. If a common
    grid has too many cells, patches are drawn on the nearest cells of a coarser one.

    Raises:
        ValueError: The patches are too far apart.
    """
    corners, side = found.corners, int(found.metres)
    offsets = np.rint(corners - corners.min(axis=0)).astype(np.int64)
    common = int(np.gcd.reduce(offsets, axis=None, initial=side))
    if not np.allclose(corners - corners.min(axis=0), offsets, atol=0.01):
        common = 1
    extent = int(offsets.max()) + side
    for cell in (common, *(side / parts for parts in _PARTS)):
        if cell * _PARTS[0] >= side and extent <= cell * _LARGEST_SIDE:
            return cell
    raise ValueError(f"--map {file}: {extent / side:,.0f} patches in a row are too many for one GeoTIFF: give .geojson")


def raster_of(found: GroundPredictions, cell: float, nothing: int) -> NDArray[np.int64]:
    """Return the likeliest class in each cell of `cell` metres, north up; `nothing` where there is no patch.

    A patch is drawn with at least one cell along each side.
    """
    corners = found.corners
    first = np.stack([corners[:, 0] - corners[:, 0].min(), corners[:, 1].max() - corners[:, 1]], axis=1)
    starts = np.rint(first / cell).astype(np.int64)
    ends = np.maximum(np.rint((first + found.metres) / cell).astype(np.int64), starts + 1)
    columns, rows = ends.max(axis=0).tolist()
    pixels = np.full((rows, columns), nothing, np.int64)
    for (left, top), (right, bottom), index in zip(
        starts.tolist(), ends.tolist(), found.likeliest.tolist(), strict=True
    ):
        pixels[top:bottom, left:right] = index
    return pixels
