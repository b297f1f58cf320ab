"""A linear head on frozen features that have mean 0 and standard deviation 1, and its file."""

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from models.probes.solvers import Array, SumOverRanks

Link = Literal["softmax", "sigmoid"]

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
    squares = sum(
        (
            np.square(features[start : start + _ROWS_AT_A_TIME] - mean).sum(axis=0)
            for start in range(0, len(features), _ROWS_AT_A_TIME)
        ),
        np.zeros_like(mean),
    )
    deviation = np.sqrt(sum_over_ranks(squares) / rows)
    constant = deviation <= rows * np.finfo(np.float64).eps * np.abs(mean)
    return Standardisation(mean, np.where(constant, 1.0, deviation), rows)


@dataclass(frozen=True)
class LinearHead:
    """A dense layer on standardised features.

    scores = (features - mean) / scale @ weights + intercepts
    """

    weights: Array
    """`(features, classes)`."""
    intercepts: Array
    """`(classes,)`."""
    mean: Array
    """`(features,)`."""
    scale: Array
    """`(features,)`."""
    link: Link
    """Function from scores to probabilities; after the hinge loss only the order of its results is meaningful."""

    @classmethod
    def of(cls, solution: Array, standardisation: Standardisation, link: Link) -> "LinearHead":
        """Make the head of a solution `(features + 1, classes)`."""
        return cls(solution[:-1], solution[-1], standardisation.mean, standardisation.scale, link)

    def probabilities(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Return the probabilities of all classes, `(rows, classes)`, of features `(rows, features)`."""
        scores = (features - self.mean) / self.scale @ self.weights + self.intercepts
        found = softmax(scores, axis=1) if self.link == "softmax" else expit(scores)
        return np.asarray(found, np.float32)

    def to_npz(self, **more: Any) -> bytes:
        """Return the arrays as a `.npz` file, which needs no pickle; `more` are further arrays of numbers or text."""
        file = io.BytesIO()
        np.savez(
            file,
            weights=self.weights,
            intercepts=self.intercepts,
            mean=self.mean,
            scale=self.scale,
            link=np.array(self.link),
            **more,
        )
        return file.getvalue()

    @classmethod
    def from_npz(cls, content: bytes) -> "LinearHead":
        """Read a file of `to_npz`."""
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return cls(
                weights=file["weights"],
                intercepts=file["intercepts"],
                mean=file["mean"],
                scale=file["scale"],
                link="softmax" if str(file["link"]) == "softmax" else "sigmoid",
            )
