"""The fitted head of a probe, for the driver: this module imports no TensorFlow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from models.probes.head import LinearHead
from pipelines.sample import Task


@dataclass(frozen=True)
class FittedPenalty:
    """The result of one penalty."""

    l2: float
    score: float
    """Metric on the validation split that compares penalties; NaN without such a split."""
    objective: float
    exchanges: int
    """Number of sums over ranks during the fit."""
    residual: float
    """Value that the solver compares with its tolerance."""
    converged: bool


@dataclass(frozen=True)
class FittedHead:
    """The head of the chosen penalty, the same on every rank."""

    head: LinearHead
    chosen: FittedPenalty
    tried: tuple[FittedPenalty, ...]
    """All penalties, the largest first."""
    metric: str
    """Name of the metric that compares penalties on the validation split."""


def selection_metric(task: Task) -> str:
    """Return the name of the metric that compares penalties: it does not depend on a threshold."""
    return "top_1" if task == "single_label" else "mean_average_precision"


def best_penalty(tried: Sequence[FittedPenalty]) -> int:
    """Return the index of the penalty with the highest score; the first, and largest, one if equal."""
    scores = [-math.inf if math.isnan(each.score) else each.score for each in tried]
    return scores.index(max(scores))
