"""An attempt at one poll as frozen values, and the decisions that follow from them alone."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipelines.launch.driver.failure import CAUSES, Kind

AttemptState = Literal["running", "failed", "ended", "requested", "finished"]
"""`ended`: all tasks have ended, but not all ranks have reported. `requested`: some rank has stopped on request."""
StopState = Literal["unasked", "due", "asked", "over"]
"""`due`: there is a reason to stop that the ranks do not know. `over`: the grace period of the request is over."""


class RankStatus(NamedTuple):
    """One rank at one poll; times are those of the driver's monotonic clock, in seconds."""

    task: int
    is_open: bool
    """Whether the end of the rank is not known."""
    has_begun: bool
    """Whether the function has been called."""
    signs: int
    """Number of steps and reports."""
    last_sign: float
    gone_since: float | None
    """When the connection of the rank's task ended; None: it is connected."""
    stacks: str
    """The stacks of the rank; empty if they are not known."""


class AttemptStatus(NamedTuple):
    """All ranks of an attempt at one poll."""

    now: float
    ranks: tuple[RankStatus, ...]
    ends: tuple[Kind, ...]
    """The known ends of ranks, in order of arrival."""

    @property
    def open_ranks(self) -> list[RankStatus]:
        """The ranks whose end is not known."""
        return [rank for rank in self.ranks if rank.is_open]

    def state(self, *, tasks_ended: bool) -> AttemptState:
        """Return the state of the attempt; a failure of one rank is one of the attempt."""
        if any(end not in ("finished", "requested") for end in self.ends):
            return "failed"
        if tasks_ended:
            return "ended"
        if self.open_ranks:
            return "running"
        return "requested" if "requested" in self.ends else "finished"

    @property
    def is_caused(self) -> bool:
        """Whether the cause of a failure is known."""
        return any(end in CAUSES for end in self.ends)

    @property
    def waits_for_cause(self) -> bool:
        """Whether all known failures are consequences, so that the driver waits for their cause."""
        return all(end in ("finished", "consequence") for end in self.ends)

    @property
    def waits_for_consequences(self) -> bool:
        """Whether other ranks will notice the failure; they do not notice a hang."""
        return "hung" not in self.ends


def first_gone(ranks: Sequence[RankStatus]) -> RankStatus:
    """Return the rank whose connection ended first, or any rank if all are connected."""
    return min(ranks, key=lambda rank: (rank.gone_since is None, rank.gone_since))


def stop_state(reason: str | None, deadline: float | None, now: float) -> StopState:
    """Return the state of a request to stop.

    Args:
        reason: Why the ranks should stop; None: they should not.
        deadline: The end of the grace period; None: the ranks do not know of the request.
        now: The time of the poll.
    """
    if reason is None:
        return "unasked"
    if deadline is None:
        return "due"
    return "over" if now > deadline else "asked"
