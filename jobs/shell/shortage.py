"""What a job says where the kernel has killed a rank, which it does when the memory of a host is short."""

import signal

from conf.schema import RunConfig
from jobs.shell.command import say
from pipelines.launch.driver.failure import RankLostError
from pipelines.training.finders.batches import smaller_batch
from pipelines.training.memory.memory import MemoryLimit, Needs
from pipelines.training.ranks.events import Event, MemoryNeeded


class ShortageHint:
    """Remembers what a rank needs, of which nothing is left to ask once it was killed."""

    def __init__(self, config: RunConfig) -> None:
        """Nothing is known before rank 0 has a model."""
        self._config = config
        self._needs: Needs | None = None
        self._limit: MemoryLimit | None = None

    def take(self, event: Event) -> None:
        """Take one event of the training or search."""
        if isinstance(event, MemoryNeeded):
            self._needs, self._limit = event.needs, event.limit

    def say(self, error: BaseException) -> None:
        """Say what to change, if this is how the job ended."""
        if not isinstance(error, RankLostError) or error.root.exit_code != -signal.SIGKILL:
            return
        begin = f"rank {error.root.rank} was killed; if memory was short"
        if self._needs is None:
            say(f"{begin}, it was so before there was a model: choose a smaller model or more memory")
            return
        where = "" if self._limit is None else f" ({self._limit.source})"
        say(f"{begin}{where}: {smaller_batch(self._config.training, self._needs, self._limit)}")
