"""The function that the driver sends to the ranks; it imports TensorFlow only there."""

from collections.abc import Sequence

from conf.sections.probe import SolverConfig
from pipelines.probing.features import Features
from pipelines.probing.fitted import FittedHead
from pipelines.sample import Task


def fit(features: Features, task: Task, solver: SolverConfig, penalties: Sequence[float]) -> FittedHead:
    """Run `pipelines.probing.worker.fit_worker`."""
    from pipelines.probing.worker import fit_worker

    return fit_worker(features, task, solver, penalties)
