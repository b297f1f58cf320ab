"""Functions that the driver sends to the workers; only there do they import the code of training.

The driver has no use for TensorFlow, whose import costs ten seconds and a GPU's memory.
"""

from pathlib import Path

from conf.schema import RunConfig
from pipelines.tracking.store import TrackedRun
from pipelines.training.results import Evaluation, TrainingSummary
from pipelines.training.site import Site


def train(config: RunConfig, run: TrackedRun, checkpoints: Path) -> TrainingSummary:
    """See `pipelines.training.worker.train_worker`."""
    from pipelines.training.worker import train_worker

    return train_worker(config, run, checkpoints)


def evaluate(config: RunConfig, model_uri: str, split: str) -> Evaluation:
    """See `pipelines.training.worker.evaluate_worker`."""
    from pipelines.training.worker import evaluate_worker

    return evaluate_worker(config, model_uri, split)


def look(config: RunConfig) -> Site:
    """See `pipelines.training.site.look`."""
    from pipelines.training import site

    return site.look(config)
