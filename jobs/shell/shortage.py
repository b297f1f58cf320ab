"""The hint for a rank that the kernel killed, which it does if a host runs out of memory."""

import signal

from conf.schema import RunConfig
from jobs.shell.command import say
from pipelines.launch.driver.failure import RankLostError
from pipelines.training.finders.batches import smaller_batch
from pipelines.training.memory.memory import MemoryLimit, Needs
from pipelines.training.ranks.events import Event, MemoryNeeded


class ShortageHint:
    """Records the memory that a rank needs, because a killed rank cannot be asked."""

    def __init__(self, config: RunConfig) -> None:
        """Start without figures: rank 0 sends them when it has a model."""
        self._config = config
        self._needs: Needs | None = None
        self._limit: MemoryLimit | None = None

    def take(self, event: Event) -> None:
        """Take one event of the training or search."""
        if isinstance(event, MemoryNeeded):
            self._needs, self._limit = event.needs, event.limit

    def say(self, error: BaseException) -> None:
        """Say what to change, if the kernel's kill ended the job."""
        if not isinstance(error, RankLostError) or error.root.exit_code != -signal.SIGKILL:
            return
        begin = f"rank {error.root.rank} was killed; if memory was short"
        if self._needs is None:
            say(f"{begin}, it was so before there was a model: choose a smaller model or more memory")
            return
        where = "" if self._limit is None else f" ({self._limit.source})"
        say(f"{begin}{where}: {smaller_batch(self._config.training, self._needs, self._limit)}")
