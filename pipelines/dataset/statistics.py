"""Exact, mergeable per-band sums: the same mean and deviation however the rows are cut into shards."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.dataset.manifest import BandStatistics


@dataclass(frozen=True)
class BandSums:
    """Pixel count, sum and sum of squares per band, as Python integers (no overflow, no rounding)."""

    count: int
    total: tuple[int, ...]
    squares: tuple[int, ...]

    @classmethod
    def of(cls, images: NDArray[np.generic]) -> "BandSums":
        """Sums of `(..., bands)` unsigned integers of at most 16 bits."""
        if images.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"band sums need uint8 or uint16 pixels, got {images.dtype}")
        pixels = images.reshape(-1, images.shape[-1])
        # Row blocks of at most 2**31 squares below 2**32 each stay below 2**63.
        total = pixels.sum(axis=0, dtype=np.int64)
        wide = pixels.astype(np.int64)
        squares = np.einsum("pb,pb->b", wide, wide)
        return cls(len(pixels), tuple(total.tolist()), tuple(squares.tolist()))

    def __add__(self, other: "BandSums") -> "BandSums":
        """Sums of both sets of pixels."""
        return BandSums(
            self.count + other.count,
            tuple(a + b for a, b in zip(self.total, other.total, strict=True)),
            tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
        )

    def statistics(self) -> BandStatistics:
        """Mean and population standard deviation per band."""
        mean = [total / self.count for total in self.total]
        # n * squares - total^2 is exact in integers; in floats it would cancel.
        variance = [
            (self.count * squares - total * total) / self.count**2
            for total, squares in zip(self.total, self.squares, strict=True)
        ]
        return BandStatistics(mean=tuple(mean), std=tuple(value**0.5 for value in variance))
