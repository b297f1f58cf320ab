"""The state of each task of an attempt, and what the driver reads from Spark's messages."""

import re
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from pipelines.launch.driver.failure import Kind, Outcome
from pipelines.launch.driver.status import AttemptStatus, RankStatus
from pipelines.launch.rank.rank_log import LAST_LINES
from pipelines.launch.wire.messages import Hello

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
    """One task and, once all have connected, its rank."""

    hello: Hello
    rank: int = -1
    outcome: Outcome | None = None
    gone_since: float | None = None
    first_probe: Future[bool] | None = None
    """Whether the driver can connect to the task's own port."""
    probe: Future[bool] | None = None
    last_probe: float = 0.0
    has_begun: bool = False
    signs: int = 0
    last_sign: float = field(default_factory=time.monotonic)
    stacks: str | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @property
    def host(self) -> str:
        """The host of the task."""
        return self.hello.host

    def status(self) -> RankStatus:
        """Return the rank at this moment."""
        return RankStatus(
            self.hello.task,
            self.outcome is None,
            self.has_begun,
            self.signs,
            self.last_sign,
            self.gone_since,
            self.stacks or "",
        )


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
    def finished(self) -> list[int]:
        """The ranks whose function has returned, in order."""
        return sorted(outcome.rank for outcome in self.outcomes if outcome.kind == "finished")

    def status(self) -> AttemptStatus:
        """Return the attempt at this moment."""
        ranks = tuple(member.status() for member in self.by_task.values())
        return AttemptStatus(time.monotonic(), ranks, tuple(outcome.kind for outcome in self.outcomes))

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


def short_reason(reason: str) -> str:
    """Return the part of Spark's reason that says what happened."""
    known = re.search(r"(rank \d+ failed: |ExecutorLostFailure|Python worker exited|TaskKilled)[^\n]*", reason)
    raised = re.search(r"^(?:\w+\.)*\w*(?:Error|Exception): [^\n]*", reason[reason.find("Traceback") :], re.MULTILINE)
    found = known or (raised if "Traceback" in reason else None)
    return (found[0] if found else reason.splitlines()[0])[:_MAXIMUM_REASON]
