"""The predictions for all samples of a split, and figures about them; this module imports no TensorFlow."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.calibration import best_thresholds
from pipelines.sample import Task

_THRESHOLD = 0.5
_SMALLEST = 1e-7
_CURVE_POINTS = 200

Array = NDArray[Any]


@dataclass(frozen=True)
class Predictions:
    """The predictions for all samples of a split, in any order."""

    probabilities: Array
    """Probabilities `(samples, classes)`."""
    targets: Array
    """Targets, 0 or 1, `(samples, classes)`."""
    rows: NDArray[np.int64]
    """Row of each sample in the split, `(samples,)`."""
    task: Task

    @property
    def decisions(self) -> NDArray[np.bool_]:
        """The predicted classes: those with a probability of at least one half, or the most likely one."""
        if self.task == "multi_label":
            return np.asarray(self.probabilities >= _THRESHOLD)
        return np.asarray(self.probabilities.argmax(1)[:, np.newaxis] == np.arange(self.probabilities.shape[1]))

    @property
    def thresholds(self) -> list[float]:
        """The threshold with the largest F1 of each class; empty if samples have one label."""
        if self.task == "single_label":
            return []
        return [float(each) for each in best_thresholds(self.probabilities, self.targets, _THRESHOLD)]

    @property
    def losses(self) -> NDArray[np.float64]:
        """Cross-entropy of each sample, `(samples,)`; with several labels it is the mean over the classes."""
        probabilities = np.clip(self.probabilities.astype(np.float64), _SMALLEST, 1 - _SMALLEST)
        if self.task == "single_label":
            return np.asarray(-np.log((probabilities * self.targets).sum(1)))
        right = np.where(self.targets > 0, probabilities, 1 - probabilities)
        return np.asarray(-np.log(right).mean(1))

    def extremes(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of the samples with the highest and the lowest losses, at most `count` of each."""
        order = np.argsort(self.losses, kind="stable")
        count = min(count, len(order) // 2)
        return order[::-1][:count], order[:count]


def confusion(predictions: Predictions) -> NDArray[np.int64]:
    """Return the confusion matrix `(classes, classes)`.

    With one label, entry (i, j) counts the samples of class i for which j was predicted. With several labels, it counts
    the samples in which label i was missed and label j was wrongly predicted. On the diagonal it counts the samples in
    which label i was found.
    """
    actual, predicted = predictions.targets > 0, predictions.decisions
    if predictions.task == "single_label":
        return (actual.T.astype(np.int64)) @ predicted
    missed, wrong = actual & ~predicted, predicted & ~actual
    counts: NDArray[np.int64] = missed.T.astype(np.int64) @ wrong
    counts[np.diag_indices_from(counts)] = (actual & predicted).sum(0)
    return counts


def precision_recall(predictions: Predictions, column: int) -> tuple[Array, Array]:
    """Return recall and precision of one class at up to 200 decreasing thresholds; empty without positives."""
    targets = predictions.targets[:, column] > 0
    if not targets.any():
        return np.zeros(0), np.zeros(0)
    scores = predictions.probabilities[:, column]
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(targets[order])
    # Samples with equal scores are always on the same side of a threshold.
    last_of_equals = np.append(np.diff(scores[order]) != 0, True)
    recall, precision = hits / hits[-1], hits / np.arange(1, len(hits) + 1)
    chosen = np.flatnonzero(last_of_equals)
    chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, _CURVE_POINTS).astype(int))]
    return recall[chosen], precision[chosen]
