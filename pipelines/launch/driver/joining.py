"""The driver's view of how ranks join: when all are ready, and which rank is a spare that took over."""

import logging
import time
from collections.abc import Callable

from pipelines.launch.driver.failure import Outcome

_MOST_WITHOUT_PROGRESS = 3
_log = logging.getLogger(__name__)


class JoinRounds:
    """Waits until every task's rank is ready, then opens a rendezvous for all of them."""

    def __init__(self, size: int, open_rendezvous: Callable[[], dict[str, str]]) -> None:
        """Start with no rank ready.

        Args:
            size: Number of ranks.
            open_rendezvous: Closes the previous rendezvous, opens a new one and returns the variables with its address.
        """
        self._size, self._open_rendezvous = size, open_rendezvous
        self._ready: dict[int, int] = {}
        self._waits_since: float | None = None
        self._deaths: dict[int, Outcome] = {}
        self._progress = -1
        self._without_progress = 0
        self._rounds = 0
        self._late: set[int] = set()

    @property
    def deaths(self) -> list[Outcome]:
        """The ranks whose process died after the last join, in order; their spares have not joined yet."""
        return list(self._deaths.values())

    def is_replaced(self, task: int, outcome: Outcome) -> bool:
        """Record the death of a rank's process; return whether its spare may take over.

        The spare may not take over before all ranks have joined once, because the others are starting. It may not take
        over either if ranks died three times in a row without progress: they would die again. Ranks that die together
        count once. A rank that dies again before it has joined counts again.
        """
        self._without_progress += not self._deaths or task in self._deaths
        self._deaths[task] = outcome
        self._ready.pop(task, None)
        if not self._rounds or self._without_progress > _MOST_WITHOUT_PROGRESS:
            return False
        _log.warning("rank %d on %s: %s; a spare process takes its place", outcome.rank, outcome.host, outcome.summary)
        return True

    def take(self, task: int, progress: int, joins: int) -> dict[str, str] | None:
        """Record that a rank is ready; return the variables for all ranks once the last rank is ready.

        Args:
            task: The rank's task.
            progress: The progress of its function.
            joins: Number of earlier orders to join that its processes received.
        """
        if joins < self._rounds:
            # The process died before it received the order to join: the spare takes that order.
            self._deaths.pop(task, None)
            return None
        self._waits_since = self._waits_since or time.monotonic()
        self._ready[task] = progress
        if len(self._ready) < self._size:
            return None
        furthest = max(self._ready.values())
        if furthest > self._progress:
            self._progress, self._without_progress = furthest, 0
        self._ready.clear()
        self._deaths.clear()
        self._late.clear()
        self._waits_since = None
        self._rounds += 1
        return self._open_rendezvous()

    def missing(self, seconds: float) -> set[int]:
        """Return the tasks whose ranks are not ready after others have waited `seconds`; empty if no rank has."""
        if self._waits_since is None or time.monotonic() - self._waits_since <= seconds:
            return set()
        return set(range(self._size)) - set(self._ready)

    def late(self, seconds: float) -> set[int]:
        """Return, each once, the tasks whose processes live but are not ready after others have waited `seconds`.

        Their spares can take their places: a survivor may hang in Horovod after the death of another rank.
        """
        late = self.missing(seconds) - set(self._deaths) - self._late if self._rounds else set()
        self._late |= late
        return late

    @property
    def ready(self) -> list[int]:
        """The tasks whose ranks wait for others."""
        return sorted(self._ready)

    @property
    def waits(self) -> bool:
        """Whether some ranks wait for others."""
        return self._waits_since is not None

    def forgive(self, pause: float) -> None:
        """Do not count a pause in which the driver received nothing."""
        if self._waits_since is not None:
            self._waits_since += pause
