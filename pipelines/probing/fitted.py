"""What a probe has fitted, for the driver: nothing here imports TensorFlow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from models.probes.head import LinearHead
from pipelines.sample import Task


@dataclass(frozen=True)
class FittedPenalty:
    """One penalty that was tried."""

    l2: float
    score: float
    """What penalties are compared by, on the validation split; NaN where there is none."""
    objective: float
    exchanges: int
    """Sums over ranks that the fit took."""
    residual: float
    """What the solver's tolerance is for."""
    converged: bool


@dataclass(frozen=True)
class FittedHead:
    """The head of the chosen penalty, the same on every rank."""

    head: LinearHead
    chosen: FittedPenalty
    tried: tuple[FittedPenalty, ...]
    """All penalties, the largest first."""
    metric: str
    """What they are compared by on the validation split."""


def selection_metric(task: Task) -> str:
    """Name the metric by which penalties are compared: one that does not depend on a threshold."""
    return "top_1" if task == "single_label" else "mean_average_precision"


def best_penalty(tried: Sequence[FittedPenalty]) -> int:
    """Return the place of the penalty with the highest score; of equal ones, the first one, which is the largest."""
    scores = [-math.inf if math.isnan(each.score) else each.score for each in tried]
    return scores.index(max(scores))
