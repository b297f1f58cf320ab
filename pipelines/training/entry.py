"""The functions that the driver sends to the workers; they import the code of training only there.

The driver does not need TensorFlow, and its import takes ten seconds and a GPU's memory.
"""

import importlib.util
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import RunConfig
from pipelines.dataset.format.manifest import read_manifest
from pipelines.storage.folder import Location
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.checkpoint.files import check_writable
from pipelines.training.finders.batches import BatchSearch
from pipelines.training.finders.rates import RangeTest
from pipelines.training.ranks.results import TrainingSummary


@dataclass(frozen=True)
class HostReport:
    """The host of a rank, and the problems found there."""

    host: str
    problems: tuple[str, ...]


def train(config: RunConfig, run: TrackedRun, checkpoints: Location) -> TrainingSummary:
    """See `pipelines.training.worker.train_worker`."""
    from pipelines.training.worker import train_worker

    return train_worker(config, run, checkpoints)


def run_range_test(config: RunConfig, rates: Sequence[float]) -> RangeTest:
    """See `pipelines.training.finders.workers.range_test_worker`."""
    from pipelines.training.finders.workers import range_test_worker

    return range_test_worker(config, rates)


def search_batch(config: RunConfig, largest_allowed: int) -> BatchSearch:
    """See `pipelines.training.finders.workers.batch_search_worker`."""
    from pipelines.training.finders.workers import batch_search_worker

    return batch_search_worker(config, largest_allowed)


def look(config: RunConfig) -> HostReport:
    """Check on a rank's host for packages, the dataset and the folder of the checkpoints."""
    problems = [
        f"the package {name} is not installed"
        for name in ("tensorflow", "keras", "horovod", "mlflow")
        if not importlib.util.find_spec(name)
    ]
    location = Location(config.training.output)
    checks: list[tuple[str, Callable[[Any], object], Any]] = [("dataset.path", read_manifest, config.dataset.path)]
    if not location.is_local:
        checks.append(("training.output", check_writable, location))
    for setting, check, value in checks:
        try:
            check(value)
        except (OSError, ValueError, RuntimeError) as error:
            problems.append(f"{setting}: {error}")
    if location.is_local and not location.is_folder():
        problems.append(f"training.output={location} does not exist here: it must be on storage that all hosts mount")
    elif location.is_local and not os.access(location, os.W_OK | os.X_OK):
        problems.append(f"training.output={location} cannot be written here")
    return HostReport(socket.gethostname(), tuple(problems))
