"""Classification metrics from the probabilities of all samples, and the score of predictions that use no image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from models.imported import errors_of_function, import_function

Array = NDArray[Any]
Counts = NDArray[np.int64]
Metric = Callable[[Array, Array], float]
"""Function from targets and probabilities of all samples, both `(samples, classes)`, to a number."""


@dataclass(frozen=True)
class ClassificationScores:
    """The quality of the predictions of a split."""

    counts: Counts
    """`(3, classes)`, see `multi_label_counts`."""
    average_precisions: NDArray[np.float64]
    """`(classes,)`, see `average_precision_per_class`."""
    metrics: dict[str, float]
    """`f1_macro` and `mean_average_precision`; with several labels `f1_micro`, with one `top_1` and, of more than five
    classes, `top_5`."""


def classification_scores(probabilities: Array, targets: Array, task: str) -> ClassificationScores:
    """Measure the predictions of all samples of a split.

    Args:
        probabilities: `(samples, classes)`.
        targets: 0 or 1, `(samples, classes)`.
        task: "multi_label", with a class predicted from a probability of 0.5 on, or "single_label".

    Raises:
        ValueError: shapes that differ or are not `(samples, classes)`, or probabilities that are not finite.
    """
    if task == "multi_label":
        counts = multi_label_counts(probabilities, targets)
        metrics = {"f1_micro": f1_micro(counts)}
    else:
        counts = single_label_counts(probabilities, targets)
        ks = (1, 5) if probabilities.shape[1] > 5 else (1,)
        metrics = {f"top_{k}": top_k_correct(probabilities, targets, k) / len(targets) for k in ks}
    precisions = average_precision_per_class(probabilities, targets)
    metrics |= {"f1_macro": f1_macro(counts), "mean_average_precision": mean_average_precision(precisions)}
    return ClassificationScores(counts, precisions, metrics)


def multi_label_counts(probabilities: Array, targets: Array, threshold: float | NDArray[np.float64] = 0.5) -> Counts:
    """Count true positives, false positives and false negatives of each class.

    Args:
        probabilities: `(samples, classes)`; a class is predicted if its probability is >= threshold.
        targets: 0 or 1, `(samples, classes)`.
        threshold: Least probability of a predicted class, in (0, 1]; one number, or one per class.

    Returns:
        `(3, classes)`: rows TP, FP, FN. Sums over parts of the samples are the counts of the whole.

    Raises:
        ValueError: shapes that differ or are not `(samples, classes)`.
    """
    _check_shapes(probabilities, targets)
    return _counts(probabilities >= threshold, targets)


def single_label_counts(probabilities: Array, targets: Array) -> Counts:
    """Count as `multi_label_counts` does, with the likeliest class (of equals, the first) as the prediction.

    Raises:
        ValueError: shapes that differ or are not `(samples, classes)`.
    """
    _check_shapes(probabilities, targets)
    likeliest = np.argmax(probabilities, axis=1)
    return _counts(likeliest[:, np.newaxis] == np.arange(probabilities.shape[1]), targets)


def f1_per_class(counts: Counts) -> NDArray[np.float64]:
    """Return F1 = 2 TP / (2 TP + FP + FN) of each class, `(classes,)`; 0 for a class neither present nor predicted."""
    true_positives, false_positives, false_negatives = counts
    return _ratio(2 * true_positives, 2 * true_positives + false_positives + false_negatives)


def f1_micro(counts: Counts) -> float:
    """Return F1 of the counts summed over classes: every decision has the same weight. 0 / 0 is 0."""
    return float(f1_per_class(counts.sum(axis=1, keepdims=True))[0])


def f1_macro(counts: Counts) -> float:
    """Return the mean F1 over all classes, with 0 for absent ones: every class has the same weight."""
    return float(f1_per_class(counts).mean())


def average_precision_per_class(probabilities: Array, targets: Array) -> NDArray[np.float64]:
    """Return the average precision of each class, `(classes,)`: sum over thresholds of (recall step) * precision.

    It is NaN for a class without positives. Unlike the counts, it needs all samples at once.

    Raises:
        ValueError: shapes that differ or are not `(samples, classes)`, or probabilities that are not finite.
    """
    _check_shapes(probabilities, targets)
    present = targets.any(axis=0)
    return np.array(
        [
            average_precision_score(targets[:, column], probabilities[:, column]) if present[column] else np.nan
            for column in range(targets.shape[1])
        ],
        dtype=np.float64,
    )


def mean_average_precision(per_class: NDArray[np.float64]) -> float:
    """Return the mean over the classes with an average precision; NaN if there is no such class."""
    defined = per_class[~np.isnan(per_class)]
    return float(defined.mean()) if defined.size else float("nan")


def top_k_correct(probabilities: Array, targets_one_hot: Array, k: int) -> int:
    """Return the number of samples whose class is among the k likeliest; of equal classes the first counts.

    Raises:
        ValueError: shapes that differ or are not `(samples, classes)`, or k outside 1..classes.
    """
    _check_shapes(probabilities, targets_one_hot)
    classes = probabilities.shape[1]
    if not 1 <= k <= classes:
        raise ValueError(f"k must be in 1..{classes} (classes), got {k}")
    likeliest = np.argsort(-probabilities, axis=1, kind="stable")[:, :k]
    return int((likeliest == np.argmax(targets_one_hot, axis=1)[:, np.newaxis]).sum())


ClassScores = TypedDict(
    "ClassScores",
    {
        "class": str,
        "support": int,
        "precision": float,
        "recall": float,
        "f1": float,
        "average_precision": float,
        "threshold": NotRequired[float],
        "f1_tuned": NotRequired[float],
    },
)
"""Scores of a class with `support` positives; the last two are present if its threshold was tuned."""


def per_class_table(
    class_names: Sequence[str], counts: Counts, average_precisions: NDArray[np.float64]
) -> list[ClassScores]:
    """Return the scores of each class; 0 / 0 is 0.

    Raises:
        ValueError: lengths that differ.
    """
    if not len(class_names) == counts.shape[1] == len(average_precisions):
        raise ValueError(
            f"expected as many class names as counts and average precisions, got {len(class_names)}, "
            f"{counts.shape[1]} and {len(average_precisions)}"
        )
    true_positives, false_positives, false_negatives = counts
    precisions = _ratio(true_positives, true_positives + false_positives)
    recalls = _ratio(true_positives, true_positives + false_negatives)
    f1_scores = f1_per_class(counts)
    return [
        {
            "class": name,
            "support": int(true_positives[index] + false_negatives[index]),
            "precision": float(precisions[index]),
            "recall": float(recalls[index]),
            "f1": float(f1_scores[index]),
            "average_precision": float(average_precisions[index]),
        }
        for index, name in enumerate(class_names)
    ]


def _counts(predicted: NDArray[np.bool_], targets: Array) -> Counts:
    actual = targets > 0
    counts: Counts = np.stack([predicted & actual, predicted & ~actual, ~predicted & actual]).sum(
        axis=1, dtype=np.int64
    )
    return counts


def _ratio(numerator: Array, denominator: Array) -> NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.zeros(numerator.shape, np.float64), where=denominator > 0)


def _check_shapes(probabilities: Array, targets: Array) -> None:
    if probabilities.ndim != 2 or probabilities.shape != targets.shape:
        raise ValueError(
            f"probabilities and targets must both be (samples, classes), got {probabilities.shape} and {targets.shape}"
        )


def imported_metric(path: str, settings: Mapping[str, Any], *, setting: str) -> Metric:
    """Return an imported metric.

        function(targets, probabilities, **settings) -> number

    The order is scikit-learn's: `label_ranking_average_precision_score` or `log_loss` work as they are. `targets` are
    uint8, `probabilities` float32, both `(samples, classes)` and of the whole split.

    Args:
        path: Import path of the function, `package.module:function`.
        settings: Further arguments of the function.
        setting: Key of the configuration that holds the path, for messages.

    Raises:
        ValueError: The function is not found; when called, an exception of the function, or a result that is no number.
    """
    function = import_function(path, setting)

    def metric(targets: Array, probabilities: Array) -> float:
        with errors_of_function(f"{setting}={path}"):  # its result may be no number
            return float(function(targets, probabilities, **settings))

    return metric


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
    return np.stack(
        [
            np.where(predicted, class_counts, 0),
            np.where(predicted, samples - class_counts, 0),
            np.where(predicted, 0, class_counts),
        ]
    )
