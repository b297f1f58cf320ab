"""The scores of a fitted head and of the model's own head on a split, from the features without the model."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from models.probes.head import LinearHead
from pipelines.probing.features import Features, as_array
from pipelines.sample import Task
from pipelines.scoring.report.evaluation import Measured, SplitScores, measure

_OF_PROBABILITIES = ("loss", "expected_calibration_error")


def scores_of(features: Features, split: str, head: LinearHead | None) -> SplitScores:
    """Return the probabilities of every sample of a split, one row group of features at a time.

    Args:
        features: Finished features.
        split: Name of the split, which must have samples.
        head: The head; None: the model's own head.
    """
    ids: list[str] = []
    probabilities, targets = [], []
    for table in features.read(split, ["id", "probabilities" if head is None else "features", "targets"]):
        ids += table["id"].to_pylist()
        targets.append(as_array(table["targets"]))
        probabilities.append(
            as_array(table["probabilities"]) if head is None else head.probabilities(as_array(table["features"]))
        )
    return SplitScores(ids, np.concatenate(probabilities), np.concatenate(targets))


def measure_head(
    features: Features,
    head: LinearHead | None,
    *,
    split: str,
    tuned_on: str | None,
    class_names: Sequence[str],
    task: Task,
    has_probabilities: bool = True,
) -> Measured:
    """Measure a head as `evaluate` measures a model.

    Args:
        features: Finished features.
        head: The head; None: the model's own head.
        split: Split to measure.
        tuned_on: Split that tunes the thresholds of a multi-label head; None: they are not tuned.
        class_names: Names of the classes.
        task: Task, which determines the scores.
        has_probabilities: Whether the head returns probabilities; scores of the hinge loss only have an order.
    """
    measured = measure(
        scores_of(features, split, head),
        class_names=class_names,
        task=task,
        columns=pa.table({}),
        own_metrics={},
        validation=scores_of(features, tuned_on, head) if tuned_on is not None else None,
    )
    if not has_probabilities:
        for name in _OF_PROBABILITIES:
            del measured.metrics[name]
    return measured
