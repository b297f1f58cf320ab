"""Exact per-band sums that can be merged: mean and deviation do not depend on how rows are cut into shards."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.dataset.format.manifest import BandStatistics

HISTOGRAM_BINS = 256
_PIXELS_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class BandSums:
    """Pixel count, and per band sum, sum of squares and histogram.

    For unsigned integers all are Python integers: nothing overflows or is rounded, and the order of merging does not
    matter. For floats the sums have double precision, and there is no histogram.
    """

    count: int
    total: tuple[float, ...]
    squares: tuple[float, ...]
    histogram: tuple[tuple[int, ...], ...]
    """Counts, `(bands, HISTOGRAM_BINS)`: bin i of 8-bit pixels holds value i, of 16-bit pixels values 64 i .. 64 i +
    63. The last bin holds all larger values."""

    @classmethod
    def of(cls, images: NDArray[Any]) -> "BandSums":
        """Sum `(..., bands)` pixels of uint8, uint16 or a floating dtype."""
        if images.dtype in (np.uint8, np.uint16):
            total, squares, histogram = zip(*map(_integer_sums, _count_values(images)), strict=True)
            return cls(images[..., 0].size, total, squares, histogram)
        if not np.issubdtype(images.dtype, np.floating):
            raise ValueError(f"band sums need uint8, uint16 or floating pixels, got {images.dtype}")
        wide = images.reshape(-1, images.shape[-1]).astype(np.float64)
        return cls(len(wide), tuple(wide.sum(axis=0).tolist()), tuple((wide**2).sum(axis=0).tolist()), ())

    def __add__(self, other: "BandSums") -> "BandSums":
        """Add the sums of two sets of pixels."""
        return BandSums(
            self.count + other.count,
            tuple(a + b for a, b in zip(self.total, other.total, strict=True)),
            tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
            tuple(
                tuple(a + b for a, b in zip(own, others, strict=True))
                for own, others in zip(self.histogram, other.histogram, strict=True)
            ),
        )

    def statistics(self) -> BandStatistics:
        """Compute mean and population standard deviation per band."""
        mean = [total / self.count for total in self.total]
        # n * squares - total^2 is exact in integers; in floats it would cancel.
        variance = [
            (self.count * squares - total * total) / self.count**2
            for total, squares in zip(self.total, self.squares, strict=True)
        ]
        return BandStatistics(mean=tuple(mean), std=tuple(max(value, 0.0) ** 0.5 for value in variance))


def _count_values(images: NDArray[Any]) -> NDArray[np.int64]:
    """Count how often each value occurs, `(bands, values)`, in blocks that fit the processor's cache."""
    bands = images.shape[-1]
    counts = np.zeros((bands, 1 << (8 * images.dtype.itemsize)), np.int64)
    rows = max(1, _PIXELS_AT_ONCE * len(images) // max(1, images[..., 0].size))
    for start in range(0, len(images), rows):
        # bincount converts to 64 bits, so the bands are first brought side by side.
        block = np.ascontiguousarray(images[start : start + rows].reshape(-1, bands).T)
        for band, pixels in enumerate(block):
            found = np.bincount(pixels)
            counts[band, : len(found)] += found
    return counts


def _integer_sums(counts: NDArray[np.int64]) -> tuple[int, int, tuple[int, ...]]:
    """Compute sum, sum of squares and histogram of one band exactly from its value counts."""
    values = np.arange(len(counts), dtype=np.int64)
    # count <= 2^31 pixels of one row group, value^2 < 2^32: below 2^63.
    total, squares = int(counts @ values), int(counts @ (values * values))
    if len(counts) > HISTOGRAM_BINS:
        width = 64
        last = (HISTOGRAM_BINS - 1) * width
        counts = np.append(counts[:last].reshape(-1, width).sum(axis=1), counts[last:].sum())
    return total, squares, tuple(counts.tolist())
