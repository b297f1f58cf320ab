"""What a model must beat: predictions that look at no image."""

import numpy as np
from numpy.typing import NDArray

from models.metrics import Counts, f1_micro


def frequent_classes(class_counts: NDArray[np.int64], samples: int) -> NDArray[np.bool_]:
    """The set of most frequent classes that, predicted for every sample, has the best micro F1 on these samples.

    Args:
        class_counts: Samples that carry each class, `(classes,)`.
        samples: Samples in all.

    Returns:
        `(classes,)`, true for the classes to predict.
    """
    order = np.argsort(-class_counts, kind="stable")
    choices = [np.isin(np.arange(len(order)), order[:count]) for count in range(1, len(order) + 1)]
    return max(choices, key=lambda chosen: f1_micro(constant_counts(chosen, class_counts, samples)))


def constant_counts(predicted: NDArray[np.bool_], class_counts: NDArray[np.int64], samples: int) -> Counts:
    """Rows TP, FP, FN, `(3, classes)`, where every sample is given the same `predicted` classes."""
    positives = np.asarray(class_counts, np.int64)
    return np.stack(
        [
            np.where(predicted, positives, 0),
            np.where(predicted, samples - positives, 0),
            np.where(predicted, 0, positives),
        ]
    )
