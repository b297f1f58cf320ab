"""Calibration of probabilities: reliability, its error, and a suitable threshold for each class."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Reliability:
    """Decisions by their probability, in bins of equal width over [0, 1]; an empty bin has NaN in both means."""

    counts: NDArray[np.int64]
    """`(bins,)`, numbers of decisions."""
    confidence: NDArray[np.float64]
    """`(bins,)`, mean probabilities of the decisions."""
    accuracy: NDArray[np.float64]
    """`(bins,)`, fractions of right decisions."""

    @property
    def expected_error(self) -> float:
        """Expected calibration error: the mean over all decisions of |accuracy - confidence| of their bin.

            ECE = sum over bins of (count / decisions) * |accuracy - confidence|

        Source: Naeini, Cooper, Hauskrecht (2015); Guo et al. (2017), equation 3.
        """
        used = self.counts > 0
        gaps = np.abs(self.accuracy[used] - self.confidence[used])
        return float((self.counts[used] * gaps).sum() / self.counts.sum()) if used.any() else float("nan")


def multi_label_reliability(probabilities: Array, targets: Array, bins: int = 15) -> Reliability:
    """Sort all decisions, one per sample and class, by probability; a decision is right if the class is present.

    Args:
        probabilities: `(samples, classes)`.
        targets: 0 or 1, `(samples, classes)`.
        bins: Number of bins.
    """
    return _reliability(probabilities.reshape(-1), targets.reshape(-1) > 0, bins)


def single_label_reliability(probabilities: Array, targets: Array, bins: int = 15) -> Reliability:
    """Sort samples by the probability of their likeliest class; a decision is right if this is the sample's class.

    Args:
        probabilities: `(samples, classes)`.
        targets: One-hot, `(samples, classes)`.
        bins: Number of bins.
    """
    likeliest = np.argmax(probabilities, axis=1)
    right = likeliest == np.argmax(targets, axis=1)
    return _reliability(np.take_along_axis(probabilities, likeliest[:, np.newaxis], axis=1)[:, 0], right, bins)


def best_thresholds(probabilities: Array, targets: Array, default: float) -> NDArray[np.float64]:
    """Return for each class the threshold with the largest F1, `(classes,)`.

    A threshold lies half-way between two neighbouring probabilities; of thresholds with equal F1, the one nearest to
    the default is taken. A class without positives keeps the default.

    Args:
        probabilities: `(samples, classes)`; a class is predicted if its probability is >= the threshold.
        targets: 0 or 1, `(samples, classes)`.
        default: The threshold of classes without positives.
    """
    return np.array(
        [
            _best_threshold(scores, present, default)
            for scores, present in zip(probabilities.T, targets.T > 0, strict=True)
        ]
    )


def _best_threshold(scores: Array, present: NDArray[np.bool_], default: float) -> float:
    if not present.any():
        return default
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order].astype(np.float64), np.cumsum(present[order])
    # Cut after place i: i + 1 samples are predicted. Between equal probabilities there is no threshold.
    last = np.append(ranked[1:] < ranked[:-1], True)
    f1 = (2 * hits / (np.arange(1, len(ranked) + 1) + hits[-1]))[last]
    candidates = ((ranked + np.append(ranked[1:], 0.0)) / 2)[last]
    best = candidates[f1 == f1.max()]
    return float(best[np.argmin(np.abs(best - default))])


def _reliability(probabilities: Array, right: NDArray[np.bool_], bins: int) -> Reliability:
    places = np.clip((probabilities * bins).astype(np.int64), 0, bins - 1)
    counts = np.bincount(places, minlength=bins)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(places, weights=probabilities, minlength=bins) / counts
        accuracy = np.bincount(places, weights=right, minlength=bins) / counts
    return Reliability(counts, confidence, accuracy)
