"""The fit of a probe on every rank, on its part of the features.

The driver imports this module too: TensorFlow is imported only on the ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from conf.sections.probe import CoCoAConfig, SolverConfig
from models.metrics import classification_scores
from models.probes.head import LinearHead, Link, standardisation
from models.probes.solvers import Array, fit_hinge, fit_logistic
from pipelines.launch.rank.report import StoppedOnRequest, step_done, stop_requested
from pipelines.probing.features import Features
from pipelines.sample import TRAINING_SPLIT, VALIDATION_SPLIT, Task
from pipelines.training.ranks.events import PenaltyFitted, tell

if TYPE_CHECKING:
    from pipelines.training.ranks.collective import HorovodCollective


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


def fit(features: Features, task: Task, solver: SolverConfig, penalties: Sequence[float]) -> FittedHead:
    """Join the ranks, and fit as `fit_head` does."""
    from pipelines.training.ranks.collective import HorovodCollective

    return fit_head(features, task, solver, penalties, HorovodCollective())


def fit_head(
    features: Features, task: Task, solver: SolverConfig, penalties: Sequence[float], collective: "HorovodCollective"
) -> FittedHead:
    """Fit a head for each penalty, and choose one on the validation split; every rank makes the same call.

    Every rank gets the same result. Rank r of N has the r-th of N nearly equal parts of the training split, which may
    be empty. The standardised features take 8 bytes per number. The largest penalty comes first, and each fit starts
    from the previous one.

    Args:
        features: Finished features.
        task: Task, which determines the loss and the metric.
        solver: Objective and algorithm.
        penalties: Penalties, all different.
        collective: Collective of the ranks, which have joined.

    Raises:
        RuntimeError: The ranks have different weights.
        StoppedOnRequest: A rank was asked to stop.
    """

    def sum_over_ranks(values: Array) -> Array:
        summed = np.asarray(collective.sum(np.append(values, float(stop_requested()))))
        if summed[-1] > 0:
            raise StoppedOnRequest("the probe was stopped; its features are kept, and nothing was recorded")
        step_done()
        return summed[:-1]

    own, labels = _part(features, TRAINING_SPLIT, collective)
    standard = standardisation(own, sum_over_ranks)
    design, targets = standard.design(own), labels.astype(np.float64)
    del own, labels  # half as much memory as the design
    validation = _part(features, VALIDATION_SPLIT, collective) if features.rows(VALIDATION_SPLIT) else None
    link: Link = "softmax" if task == "single_label" and not isinstance(solver, CoCoAConfig) else "sigmoid"

    tried: list[FittedPenalty] = []
    heads: list[LinearHead] = []
    state: Array | None = None
    for number, l2 in enumerate(sorted(penalties, reverse=True), start=1):
        shared: dict[str, Any] = {"rows": standard.rows, "l2": l2, "start": state, **solver.arguments()}
        if isinstance(solver, CoCoAConfig):
            rank, ranks = collective.rank, collective.size
            found = fit_hinge(design, targets, sum_over_ranks, rank=rank, ranks=ranks, **shared)
        else:
            found = fit_logistic(design, targets, sum_over_ranks, task=task, **shared)
        state = found.state
        heads.append(LinearHead.of(found.weights, standard, link))
        score = math.nan if validation is None else _score(heads[-1], *validation, task, collective)
        tried.append(FittedPenalty(l2, score, found.objective, found.exchanges, found.residual, found.converged))
        if collective.rank == 0:
            tell(PenaltyFitted(number=number, penalties=len(penalties), l2=l2, exchanges=found.exchanges))
    scores = [-math.inf if math.isnan(each.score) else each.score for each in tried]
    best = scores.index(max(scores))  # the first, and largest, of equal ones
    return FittedHead(heads[best], tried[best], tuple(tried), _selection_metric(task))


def _part(
    features: Features, split: str, collective: "HorovodCollective"
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the features and targets of this rank's samples of a split."""
    rows, rank, ranks = features.rows(split), collective.rank, collective.size
    start, stop = rows * rank // ranks, rows * (rank + 1) // ranks
    # A rank without samples reads one to get the numbers of features and classes.
    read = {name: features.array(split, name, start, max(stop, start + 1)) for name in ("features", "targets")}
    return read["features"][: stop - start], read["targets"][: stop - start]


def _score(
    head: LinearHead,
    features: NDArray[np.float32],
    targets: NDArray[np.uint8],
    task: Task,
    collective: "HorovodCollective",
) -> float:
    """Return the metric of all samples that compares penalties; it is the same on every rank."""
    probabilities = collective.concatenate(head.probabilities(features))
    all_targets = collective.concatenate(targets)
    return classification_scores(probabilities, all_targets, task).metrics[_selection_metric(task)]


def _selection_metric(task: Task) -> str:
    """Return the name of the metric that compares penalties: it does not depend on a threshold."""
    return "top_1" if task == "single_label" else "mean_average_precision"
