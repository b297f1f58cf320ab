"""Pictures of the dataset report, as PNG in data URIs, so that the page needs no other file."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from pipelines.dataset.format.statistics import HISTOGRAM_BINS
from pipelines.sample import ImageGroup

_CSS_PIXELS_PER_INCH = 96
_PREVIEW_PIXELS = 128
_RGB_BANDS = ("B04", "B03", "B02")
_BIN_WIDTHS = {"uint8": 1, "uint16": 64}  # widths of the bins of `BandSums.histogram`
_SHOWN_PART = 0.999  # part of the pixels; a few very bright ones would squeeze all others


@dataclass(frozen=True)
class Colors:
    """Colours of one colour scheme."""

    text: str
    fill: str
    mark: str


_LIGHT = Colors(text="#5b6472", fill="#3b74c4", mark="#b3410e")
_DARK = Colors(text="#a3acba", fill="#6ea3ea", mark="#f0a070")
_ON_BOTH = Colors(text="#7d8694", fill="#4f88d6", mark="#cf6a33")
"""Colours that can be read on a light and on a dark page."""


@dataclass(frozen=True)
class Plot:
    """One plot in two colour schemes; it is transparent and shows the page's background."""

    light: str
    dark: str
    width: int
    """Width in CSS pixels."""
    height: int


def band_histogram(histogram: Sequence[int], mean: float, right: int, dtype: str) -> Plot:
    """Draw the shares of pixels by value, and the mean as a line.

    Args:
        histogram: `BandSums.histogram` of one band.
        mean: Mean of the same pixels, in stored units.
        right: Number of bins to show, from 0 on.
        dtype: Numpy name of the pixels' dtype.
    """

    def draw(axis: Axes, colors: Colors) -> None:
        edges = np.arange(right + 1) * _BIN_WIDTHS[dtype]
        axis.stairs(np.asarray(histogram[:right], np.float64), edges, fill=True, color=colors.fill)
        if mean <= edges[-1]:
            axis.axvline(mean, color=colors.mark, linewidth=1.2)
        axis.set_xlim(0, float(edges[-1]))
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)

    return plot(draw, width=232, height=120)


def shown_bins(histograms: Sequence[Sequence[int]], dtype: str) -> int:
    """Return the bins of a group's histograms that hold nearly all pixels of every band; 8-bit ones in full."""
    if dtype == "uint8":
        return HISTOGRAM_BINS
    shares = [np.cumsum(histogram) / max(sum(histogram), 1) for histogram in histograms]
    return max([8, *(int(np.searchsorted(share, _SHOWN_PART)) + 1 for share in shares)])


def class_balance(counts: Sequence[int]) -> Plot:
    """Draw the number of samples per class, the most frequent class first."""
    ordered = np.sort(np.asarray(counts, np.float64))[::-1]
    present = ordered[ordered > 0]

    def draw(axis: Axes, colors: Colors) -> None:
        axis.stairs(ordered, np.arange(len(ordered) + 1) + 0.5, fill=True, color=colors.fill)
        axis.set_xlim(0.5, len(ordered) + 0.5)
        if len(present) and present[0] > 100 * present[-1]:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
            axis.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axis.set_xlabel("class, by frequency", color=colors.text, fontsize=8)
        axis.set_ylabel("samples", color=colors.text, fontsize=8)

    return plot(draw, width=680, height=240)


def preview(images: Mapping[str, NDArray[np.generic]], groups: Sequence[ImageGroup]) -> str:
    """Draw one sample as people see it (`visible`), and return the picture's data URI."""
    return _data_uri(Image.fromarray(visible(images, groups)))


def visible(images: Mapping[str, NDArray[np.generic]], groups: Sequence[ImageGroup]) -> NDArray[np.uint8]:
    """Return the pixels of one sample as people see it, `(height, width, 3)`.

    Known bands give red, green and blue: B04, B03, B02 of Sentinel-2, or three 8-bit bands unchanged. Otherwise the
    first band is shown in grey. Pixels that are not 8-bit are stretched from their 2nd to their 98th percentile.

    Args:
        images: `(height, width, bands)` by image group.
        groups: Descriptions of the image groups.
    """
    pixels = _visible_bands(images, groups)
    step = -(-max(pixels.shape[:2]) // _PREVIEW_PIXELS)
    pixels = pixels[::step, ::step]
    if pixels.dtype != np.uint8:
        values = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
        low, high = np.percentile(values, (2, 98))
        pixels = np.clip((values - low) / ((high - low) or 1.0) * 255, 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def _visible_bands(images: Mapping[str, NDArray[np.generic]], groups: Sequence[ImageGroup]) -> NDArray[np.generic]:
    for group in groups:
        if set(_RGB_BANDS) <= set(group.bands):
            return images[group.name][..., [group.bands.index(band) for band in _RGB_BANDS]]
    for group in groups:
        if group.dtype == "uint8" and len(group.bands) == 3:
            return images[group.name]
    return images[groups[0].name][..., :1]


def plot(draw: Callable[[Axes, Colors], None], width: int, height: int) -> Plot:
    """Draw in both colour schemes; sizes are in CSS pixels."""
    return Plot(picture(draw, width, height, _LIGHT), picture(draw, width, height, _DARK), width, height)


def picture(draw: Callable[[Axes, Colors], None], width: int, height: int, colors: Colors = _ON_BOTH) -> str:
    """Draw in one colour scheme, with room for all labels, and return the picture's data URI."""
    figure = Figure(figsize=(width / _CSS_PIXELS_PER_INCH, height / _CSS_PIXELS_PER_INCH), layout="constrained")
    axis = figure.add_subplot(facecolor="none")
    draw(axis, colors)
    axis.tick_params(which="both", colors=colors.text, labelsize=7.5)
    axis.spines[:].set_color(colors.text)
    axis.spines[:].set_linewidth(0.6)
    axis.spines[["top", "right"]].set_visible(False)
    # Faster than `savefig`.
    figure.patch.set_alpha(0.0)
    figure.set_dpi(2 * _CSS_PIXELS_PER_INCH)  # sharp on displays with two dots per CSS pixel
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    # 256 colours are enough for lines, and a third of the size.
    return _data_uri(Image.fromarray(np.asarray(canvas.buffer_rgba())).quantize())


def _data_uri(image: Image.Image) -> str:
    file = io.BytesIO()
    # Little compression is faster, and enough: a small plot is mostly transparent.
    image.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
