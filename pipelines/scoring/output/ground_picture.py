"""The picture of a map of predictions."""

import math
from collections import Counter

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipelines.dataset.report.tables import shorten
from pipelines.scoring.output.ground_geometry import GroundPredictions, raster_of

_INCHES, _LONGEST_NAME = 10.0, 44
_CELLS_OF_A_PICTURE, _SMALLEST_IN_A_PICTURE = 1500, 9
"""Cells along the longer side of a picture, and least cells along a patch, which else could fall between dots."""


def draw(found: GroundPredictions) -> Figure:
    """Draw one map per coordinate system, and a legend with the number of patches of each class."""
    codes = [code for code, _ in Counter(found.systems.tolist()).most_common()]
    columns = min(3, len(codes))
    rows = math.ceil(len(codes) / columns)
    figure = Figure(figsize=(_INCHES, 2.2 + 0.95 * _INCHES * rows / columns), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    colours = class_colours(len(found.class_names))
    scheme = ListedColormap(colours).with_extremes(under="none")
    for axis, code in zip(axes, codes, strict=False):
        own = found.of(code)
        corners = own.corners
        width, height = np.ptp(corners, axis=0).tolist()
        margin = max(own.metres, 0.03 * max(width, height))
        # One image for all patches: an artist for each would take minutes and gigabytes.
        cell = max((max(width, height) + own.metres) / _CELLS_OF_A_PICTURE, 1.0)
        pixels = raster_of(own, cell, -1, smallest=_SMALLEST_IN_A_PICTURE)
        left, top = corners[:, 0].min(), corners[:, 1].max()
        extent = (left, left + pixels.shape[1] * cell, top - pixels.shape[0] * cell, top)
        axis.imshow(pixels, cmap=scheme, vmin=-0.5, vmax=len(colours) - 0.5, extent=extent, interpolation="nearest")
        axis.set_xlim(extent[0] - margin, extent[1] + margin)
        axis.set_ylim(extent[2] - margin, extent[3] + margin)
        axis.set_aspect("equal")
        axis.set_title(f"EPSG {code}, {len(corners):,} {'patch' if len(corners) == 1 else 'patches'}", fontsize=9)
        axis.ticklabel_format(style="plain", useOffset=False)
        axis.tick_params(labelsize=7)
        axis.tick_params(axis="x", labelrotation=30)
        if width < height / 2:  # the two labels would overlap
            axis.set_xticks([left])
    for axis in list(axes)[len(codes) :]:
        axis.set_visible(False)
    counts = Counter(found.likeliest.tolist())
    handles = [
        Patch(color=colours[index], label=f"{shorten(found.class_names[index], _LONGEST_NAME)} ({count:,})")
        for index, count in counts.most_common()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
        title="likeliest class (patches)",
    )
    return figure


def class_colours(classes: int) -> list[str]:
    """Return a colour for each class as `#rrggbb`, the same for every map with this number of classes."""
    scheme = colormaps["tab20"] if classes <= 20 else colormaps["turbo"]
    places = range(classes) if classes <= 20 else np.linspace(0, 1, classes)
    return ["#" + "".join(f"{round(255 * part):02x}" for part in scheme(place)[:3]) for place in places]
