"""The error text when a rank runs out of memory, in the rank and on the driver."""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from conf.sections.training import TrainingConfig
from pipelines.launch.rank import membership
from pipelines.training.finders.batches import FRACTION, smaller_batch
from pipelines.training.memory.memory import MemoryLimit, Needs, memory_limit, resident_peak
from pipelines.training.memory.needs import estimate
from pipelines.training.ranks.collective import rank_of_job, ranks_on_host
from pipelines.training.ranks.events import MemoryNeeded, tell
from pipelines.training.setup.rank_setup import RankSetup
from pipelines.training.step.mode import Mode


class Shortage:
    """The known memory needs of a rank, for the error text if its memory runs out."""

    def __init__(self, training: TrainingConfig) -> None:
        """Start without needs, because there is no model yet."""
        self._training = training
        self._needs: Needs | None = None
        self._limit: MemoryLimit | None = None

    def know(self, setup: RankSetup, mode: Mode) -> None:
        """Estimate the needs of the model; rank 0 sends them to the driver, because a killed rank sends nothing.

        Args:
            setup: The setup of the rank.
            mode: Its training mode.
        """
        self._needs = estimate(setup.model, mode, setup.manifest, accumulates=setup.micro_batches > 1)
        self._limit = _limit()
        if setup.collective.rank == 0 and not membership.is_spare():
            tell(MemoryNeeded(needs=self._needs, limit=self._limit))

    def has_room(self) -> bool:
        """Estimate whether this spare can compute a step at the same time as its rank; never on a GPU."""
        needs, limit = self._needs, self._limit
        if needs is None or limit is None or tf.config.get_visible_devices("GPU"):
            return False
        # This process uses as much memory as a rank before its first step.
        each = resident_peak() + needs.gradients + self._training.batch_size_per_worker * needs.sample
        states = 2 * (needs.weights + needs.optimizer + needs.exchange)  # the in-memory checkpoints that both share
        return 2 * each + states <= FRACTION * limit.bytes

    def text(self) -> str:
        """Return the error text for a rank that has run out of memory."""
        begin = f"rank {rank_of_job()} ran out of memory"
        if self._needs is None:
            return f"{begin} before it had a model, whatever the batch is: choose a smaller model or more memory"
        return f"{begin} with {smaller_batch(self._training, self._needs, self._limit)}"


@contextmanager
def shortage_explained(training: TrainingConfig) -> Iterator[Shortage]:
    """Explain an error of memory: name rank, batch and needs of the model, and a batch that would fit.

    Raises:
        MemoryError: Memory ran out. This error replaces that of TensorFlow, or one with less information.
    """
    shortage = Shortage(training)
    try:
        yield shortage
    except (tf.errors.ResourceExhaustedError, MemoryError):
        text = shortage.text()
    else:
        return
    # Outside the handler, so that the error does not include TensorFlow's trace of the graph.
    raise MemoryError(text)


def _limit() -> MemoryLimit | None:
    try:
        return memory_limit(ranks_on_host())
    except RuntimeError:  # nvidia-smi does not answer
        return None
