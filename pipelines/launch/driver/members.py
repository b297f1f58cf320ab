"""The state of each task of an attempt, and what the driver reads from Spark's messages and from stacks."""

import re
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from pipelines.launch.driver.failure import Outcome
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


@dataclass(frozen=True)
class Limits:
    """The time limits of the driver, in seconds."""

    start: float
    """Seconds within which all ranks must begin."""
    hang: float | None
    """Seconds that a rank may be silent; None: no limit."""
    stop_grace: float
    """Seconds within which ranks must end after a request to stop."""


@dataclass
class Member:
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


def short_reason(reason: str) -> str:
    """Return the part of Spark's reason that says what happened."""
    known = re.search(r"(rank \d+ failed: |ExecutorLostFailure|Python worker exited|TaskKilled)[^\n]*", reason)
    raised = re.search(r"^(?:\w+\.)*\w*(?:Error|Exception): [^\n]*", reason[reason.find("Traceback") :], re.MULTILINE)
    found = known or (raised if "Traceback" in reason else None)
    return (found[0] if found else reason.splitlines()[0])[:_MAXIMUM_REASON]


def waits_in_collective(stacks: str) -> bool:
    """Return whether the stacks of a rank show that it waits for other ranks inside TensorFlow or Horovod."""
    match = re.search(r'Current thread[^\n]*\n\s*File "([^"]+)"', stacks)
    return match is not None and ("/tensorflow/" in match[1] or "/horovod/" in match[1])
