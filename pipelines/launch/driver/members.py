"""The state of each task of an attempt and of its rank, and what the driver concludes from them."""

import re
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipelines.launch.driver.failure import CAUSES, Kind, Outcome
from pipelines.launch.policy import TimeLimits
from pipelines.launch.rank.rank_log import LAST_LINES
from pipelines.launch.wire.messages import Hello

AttemptState = Literal["running", "failed", "ended", "requested", "finished"]
"""`ended`: all tasks have ended, but not all ranks have reported. `requested`: some rank has stopped on request."""
_MAXIMUM_REASON = 300


class Tasks(Protocol):
    """The tasks that run the ranks' processes."""

    def failure(self) -> str | None:
        """Return why the tasks have failed; None while they have not."""

    def stop_reason(self) -> str | None:
        """Return why the ranks should stop soon; None while there is no reason."""

    def finished(self) -> bool:
        """Return whether all tasks have ended."""


@dataclass
class AttemptMember:
    """One task and, once all have connected, its rank; times are those of the driver's monotonic clock, in seconds."""

    hello: Hello
    rank: int = -1
    outcome: Outcome | None = None
    """The end of the rank; None: it is not known."""
    gone_since: float | None = None
    """When the connection of the task ended; None: it is connected."""
    first_probe: Future[bool] | None = None
    """Whether the driver can connect to the task's own port."""
    probe: Future[bool] | None = None
    last_probe: float = 0.0
    has_begun: bool = False
    """Whether the function has been called."""
    signs: int = 0
    """Number of steps and reports."""
    last_sign: float = field(default_factory=time.monotonic)
    stacks: str | None = None
    """The stacks of the rank; None: they are not known."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @property
    def host(self) -> str:
        """The host of the task."""
        return self.hello.host


class AttemptMembers:
    """All members of an attempt by task, and the ends of their ranks in order of arrival."""

    def __init__(self) -> None:
        """Start without members."""
        self.by_task: dict[int, AttemptMember] = {}
        self.outcomes: list[Outcome] = []

    @property
    def open(self) -> list[AttemptMember]:
        """The members whose end is not known."""
        return [member for member in self.by_task.values() if member.outcome is None]

    @property
    def ends(self) -> list[Kind]:
        """The known ends of ranks, in order of arrival."""
        return [outcome.kind for outcome in self.outcomes]

    def state(self, *, tasks_ended: bool) -> AttemptState:
        """Return the state of the attempt; a failure of one rank is one of the attempt."""
        if any(end not in ("finished", "requested") for end in self.ends):
            return "failed"
        if tasks_ended:
            return "ended"
        if self.open:
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

    def hang(self, now: float, limits: TimeLimits) -> bool:
        """Return whether a rank whose end is not known has given no sign of life for too long."""
        latest = max(member.last_sign for member in self.by_task.values())
        return any(_is_late(member, latest, now, limits) for member in self.open)

    def end(self, member: AttemptMember, outcome: Outcome) -> None:
        """Record the end of a rank, unless an earlier end is known."""
        if member.outcome is None:
            member.outcome = outcome
            self.outcomes.append(outcome)

    def end_as(self, member: AttemptMember, kind: Kind, words: str, evidence: str = "") -> None:
        """Record an end that the driver concludes from what it knows."""
        self.end(member, Outcome(member.rank, member.host, kind, words, None, evidence, tuple(member.last_lines)))

    def end_before(self, outcomes: Sequence[Outcome]) -> None:
        """Record ends that came before all known ones."""
        later, self.outcomes = self.outcomes, []
        for outcome in outcomes:
            self.end(next(each for each in self.by_task.values() if each.rank == outcome.rank), outcome)
        self.outcomes += later

    def forgive(self, pause: float) -> None:
        """Do not count a pause in which the driver received nothing."""
        for member in self.by_task.values():
            member.last_sign += pause
            if member.gone_since is not None:
                member.gone_since += pause


def _is_late(member: AttemptMember, latest: float, now: float, limits: TimeLimits) -> bool:
    if not member.has_begun:
        return now - member.last_sign > limits.start
    # A rank that never reports is measured by the last sign of any rank.
    return limits.hang is not None and now - (member.last_sign if member.signs else latest) > limits.hang


def first_gone(members: Sequence[AttemptMember]) -> AttemptMember:
    """Return the member whose connection ended first, or any member if all are connected."""
    return min(members, key=lambda member: (member.gone_since is None, member.gone_since))


def suspect(members: Sequence[AttemptMember]) -> AttemptMember:
    """Return the member for which the others wait inside a collective operation, by their stacks and signs of life."""
    suspects = [member for member in members if not waits_in_collective(member.stacks or "")] or members
    return min(suspects, key=lambda member: (member.has_begun, member.signs, member.last_sign))


def waits_in_collective(stacks: str) -> bool:
    """Return whether the stacks of a rank show that it waits for other ranks inside TensorFlow or Horovod."""
    match = re.search(r'Current thread[^\n]*\n\s*File "([^"]+)"', stacks)
    return match is not None and ("/tensorflow/" in match[1] or "/horovod/" in match[1])


def short_reason(reason: str) -> str:
    """Return the part of Spark's reason that says what happened."""
    known = re.search(r"(rank \d+ failed: |ExecutorLostFailure|Python worker exited|TaskKilled)[^\n]*", reason)
    raised = re.search(r"^(?:\w+\.)*\w*(?:Error|Exception): [^\n]*", reason[reason.find("Traceback") :], re.MULTILINE)
    found = known or (raised if "Traceback" in reason else None)
    return (found[0] if found else reason.splitlines()[0])[:_MAXIMUM_REASON]
