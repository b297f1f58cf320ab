"""The functions that the driver sends to the workers; they import the code of training only there.

The driver does not need TensorFlow, and its import takes ten seconds and a GPU's memory.
"""

from collections.abc import Sequence

from conf.schema import RunConfig
from pipelines.storage.folder import Location
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.driver import site
from pipelines.training.finders.batches import BatchSearch
from pipelines.training.finders.rates import RangeTest
from pipelines.training.ranks.results import TrainingSummary


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


def look(config: RunConfig) -> site.HostReport:
    """See `pipelines.training.driver.site.look`."""
    return site.look(config.training.output, config.dataset.path)
