"""The function that the driver sends to the ranks, which imports TensorFlow only there."""

from collections.abc import Sequence

from conf.sections.probe import SolverConfig
from pipelines.probing.features import Features
from pipelines.probing.fitted import FittedHead
from pipelines.sample import Task


def fit(features: Features, task: Task, solver: SolverConfig, penalties: Sequence[float]) -> FittedHead:
    """Join the ranks, and fit as `pipelines.probing.worker.fit_head` does."""
    from pipelines.probing.worker import fit_head
    from pipelines.training.ranks.collective import HorovodCollective

    return fit_head(features, task, solver, penalties, HorovodCollective())
