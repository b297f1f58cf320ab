"""Features with mean 0 and standard deviation 1, from sums over all ranks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.probes.agreement import Array, SumOverRanks

_ROWS_AT_A_TIME = 1024  # all squares together would need twice the memory of the features


@dataclass(frozen=True)
class Standardisation:
    """The shift and the scale of features."""

    mean: Array
    """`(features,)`."""
    scale: Array
    """Standard deviation (of the population), 1 for a constant feature, `(features,)`."""
    rows: int
    """Number of samples of all ranks."""

    def design(self, features: NDArray[Any]) -> Array:
        """Return standardised features and a last column of ones, `(rows, features + 1)`: 8 bytes for each number."""
        found = np.empty((len(features), features.shape[1] + 1), np.float64)
        np.subtract(features, self.mean, out=found[:, :-1])
        found[:, :-1] /= self.scale
        found[:, -1] = 1.0
        return found


def standardisation(features: NDArray[Any], sum_over_ranks: SumOverRanks) -> Standardisation:
    """Measure features over all ranks, in two sums: the mean, and then the squares of the differences from it.

    A feature counts as constant if its standard deviation is at most the rounding of its mean.

    Args:
        features: Features of this rank's samples, `(rows, features)`; a rank may have no samples.
        sum_over_ranks: The collective.

    Raises:
        ValueError: All ranks are without samples.
    """
    sums = sum_over_ranks(np.append(features.sum(axis=0, dtype=np.float64), len(features)))
    rows = int(sums[-1])
    if rows == 0:
        raise ValueError("features of no samples have no mean")
    mean = sums[:-1] / rows
    squares = np.zeros_like(mean)
    for start in range(0, len(features), _ROWS_AT_A_TIME):
        squares += np.square(features[start : start + _ROWS_AT_A_TIME] - mean).sum(axis=0)
    deviation = np.sqrt(sum_over_ranks(squares) / rows)
    constant = deviation <= rows * np.finfo(np.float64).eps * np.abs(mean)
    return Standardisation(mean, np.where(constant, 1.0, deviation), rows)
