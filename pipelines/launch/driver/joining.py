"""The driver's view of how ranks join each other: when all are ready, and which of them is a spare that took over."""

import logging
import time
from collections.abc import Callable

from pipelines.launch.driver.failure import Outcome

_MOST_WITHOUT_PROGRESS = 3
_log = logging.getLogger(__name__)


class Joining:
    """Waits until every task's rank is ready, then opens a rendezvous for all of them."""

    def __init__(self, size: int, open_rendezvous: Callable[[], dict[str, str]]) -> None:
        """Nobody is ready.

        Args:
            size: Number of ranks.
            open_rendezvous: Closes the rendezvous before and opens a new one; returns the variables that lead to it.
        """
        self._size, self._open_rendezvous = size, open_rendezvous
        self._ready: dict[int, int] = {}
        self._waits_since: float | None = None
        self._fallen: dict[int, Outcome] = {}
        self._progress = -1
        self._without_progress = 0
        self._rounds = 0

    @property
    def fallen(self) -> list[Outcome]:
        """Ranks whose process has died since all have joined last, in order; their spares have not joined yet."""
        return list(self._fallen.values())

    def is_replaced(self, task: int, outcome: Outcome) -> bool:
        """Take note of a rank whose process has died; whether its spare may take over.

        It may not before all have joined once: the others begin, and do not expect a rank that goes on. Nor may it
        where ranks died three times in turn without progress between: the same thing would happen again. Ranks that
        die together count once, a rank that dies again before it has joined counts again.
        """
        self._without_progress += not self._fallen or task in self._fallen
        self._fallen[task] = outcome
        self._ready.pop(task, None)
        if not self._rounds or self._without_progress > _MOST_WITHOUT_PROGRESS:
            return False
        _log.warning("rank %d on %s: %s; a spare process takes its place", outcome.rank, outcome.host, outcome.summary)
        return True

    def take(self, task: int, progress: int, joins: int) -> dict[str, str] | None:
        """Take note of a rank that is ready; the variables for all ranks once the last one is.

        Args:
            task: The rank's task.
            progress: How far its function is.
            joins: How often its processes were told to join before.
        """
        if joins < self._rounds:
            # Its process died while the order to join was on the way to it: the spare takes that order.
            self._fallen.pop(task, None)
            return None
        self._waits_since = self._waits_since or time.monotonic()
        self._ready[task] = progress
        if len(self._ready) < self._size:
            return None
        furthest = max(self._ready.values())
        if furthest > self._progress:
            self._progress, self._without_progress = furthest, 0
        self._ready.clear()
        self._fallen.clear()
        self._waits_since = None
        self._rounds += 1
        return self._open_rendezvous()

    def missing(self, seconds: float) -> set[int] | None:
        """Tasks whose ranks are not ready though others have waited so long for them; None while nobody has."""
        if self._waits_since is None or time.monotonic() - self._waits_since <= seconds:
            return None
        return set(range(self._size)) - set(self._ready)

    @property
    def ready(self) -> list[int]:
        """Tasks whose ranks wait for others."""
        return sorted(self._ready)

    @property
    def waits(self) -> bool:
        """Whether some ranks wait for others."""
        return self._waits_since is not None

    def forgive(self, pause: float) -> None:
        """Do not count a time in which the driver has heard nobody."""
        if self._waits_since is not None:
            self._waits_since += pause
