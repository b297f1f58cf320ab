"""Baselines that a model must beat: predictions that use no image."""

import numpy as np
from numpy.typing import NDArray

from models.metrics import Counts, f1_micro


def frequent_classes(class_counts: NDArray[np.int64], samples: int) -> NDArray[np.bool_]:
    """Return the set of most frequent classes with the best micro F1 as the prediction for every sample.

    Args:
        class_counts: Number of samples of each class, `(classes,)`.
        samples: Number of all samples.

    Returns:
        A mask `(classes,)`, true for the classes to predict.
    """
    order = np.argsort(-class_counts, kind="stable")
    choices = [np.isin(np.arange(len(order)), order[:count]) for count in range(1, len(order) + 1)]
    return max(choices, key=lambda chosen: f1_micro(constant_counts(chosen, class_counts, samples)))


def constant_counts(predicted: NDArray[np.bool_], class_counts: NDArray[np.int64], samples: int) -> Counts:
    """Return rows TP, FP, FN, `(3, classes)`, if the same `predicted` classes are predicted for every sample."""
    positives = np.asarray(class_counts, np.int64)
    return np.stack(
        [
            np.where(predicted, positives, 0),
            np.where(predicted, samples - positives, 0),
            np.where(predicted, 0, positives),
        ]
    )
