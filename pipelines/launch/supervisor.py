"""The driver's view of a running job: who is there, who has ended how, who is lost, who hangs."""

import logging
import math
import queue
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipelines.launch.channel import DriverChannel, Message
from pipelines.launch.failure import Outcome, StartError, failure_of, outcome_of_exit
from pipelines.launch.logs import LAST_LINES
from pipelines.launch.preflight import answers

_LOOK_SECONDS = 0.1
_GONE_SECONDS = 3.0
_SILENT_SECONDS = 5.0
# Survivors notice within a tenth of a second that a peer is gone; the rank that caused it may take longer to say so.
_CONSEQUENCES_SECONDS = 1.0
_CAUSE_SECONDS = 5.0
_STOP_SECONDS = 5.0
_STACKS_SECONDS = 4.0
_MAXIMUM_REASON = 300
_log = logging.getLogger(__name__)


class Stage(Protocol):
    """The tasks that hold the ranks' processes."""

    def failure(self) -> str | None:
        """Why the stage has failed; None while it has not."""

    def finished(self) -> bool:
        """Whether all tasks have ended."""


class Listener(Protocol):
    """Where a run's messages go."""

    def lines(self, rank: int, lines: list[str]) -> None:
        """Of a rank's output."""

    def callback(self, rank: int, line: str) -> None:
        """From `log_to_driver`."""

    def report(self, message: Message) -> None:
        """From `report`."""


@dataclass
class Member:
    """One task and, once all have said hello, its rank."""

    task: int
    hello: Message
    rank: int = -1
    outcome: Outcome | None = None
    gone_since: float | None = None
    last_probe: float = 0.0
    begun: bool = False
    signs: int = 0
    last_sign: float = field(default_factory=time.monotonic)
    stacks: str | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @property
    def host(self) -> str:
        """Where it runs."""
        return str(self.hello["host"])


class Supervisor:
    """Gathers the tasks of one attempt, lets them go, and watches until all have finished or one has failed."""

    def __init__(
        self,
        channel: DriverChannel,
        stage: Stage,
        size: int,
        listener: Listener,
        *,
        start_timeout: float,
        hang_timeout: float | None,
    ) -> None:
        """Nothing happens yet."""
        self._channel, self._stage, self._size, self._listener = channel, stage, size, listener
        self._start_timeout, self._hang_timeout = start_timeout, hang_timeout
        self._members: dict[int, Member] = {}
        self._outcomes: list[Outcome] = []
        self._started_anew = False

    def gather(self) -> list[Message]:
        """Every task's hello, by task.

        Raises:
            StartError: Not all have come in time, or Spark has given up.
        """
        deadline = time.monotonic() + self._start_timeout
        while len(self._members) < self._size:
            self._take(_LOOK_SECONDS)
            missing = f"{self._size - len(self._members)} of {self._size} tasks have not reached the driver"
            if (reason := self._stage_failure()) is not None:
                raise StartError(f"{missing}: {_short(reason)}")
            if time.monotonic() > deadline:
                address = self._channel.address
                raise StartError(
                    f"{missing} at {address.host}:{address.port} after start_timeout={self._start_timeout:g} s: do "
                    "executors reach that address (spark.driver.host)? Do their tasks start?"
                )
        return [self._members[task].hello for task in range(self._size)]

    def go(self, ranks: list[int], environments: list[dict[str, str]]) -> None:
        """Give each task its rank and the variables of its process."""
        for task, member in self._members.items():
            member.rank, member.last_sign = ranks[task], time.monotonic()
            self._channel.send(task, {"kind": "go", "rank": ranks[task], "environment": environments[task]})

    def stop(self) -> None:
        """Tell all tasks to end their processes."""
        for task in self._members:
            self._channel.send(task, {"kind": "stop"})

    def watch(self) -> None:
        """Return when all ranks have finished.

        Raises:
            WorkerError: The function raised in a rank; all others have been stopped.
            RankLostError: A rank ended otherwise; all others have been stopped.
        """
        while self._open():
            finished = self._stage.finished()
            self._take(_LOOK_SECONDS)
            self._look_at_stage()
            self._look_for_lost()
            self._look_for_hang()
            if any(outcome.kind != "finished" for outcome in self._outcomes):
                self._settle()
                raise failure_of(self._outcomes)
            if finished:  # without the last word of a rank whose channel broke: its result came by way of Spark
                return

    def _open(self) -> list[Member]:
        return [member for member in self._members.values() if member.outcome is None]

    def _take(self, seconds: float) -> None:
        """Handle what has come, or wait a while for something."""
        try:
            task, message = self._channel.events.get(timeout=seconds)
            while True:
                self._handle(task, message)
                task, message = self._channel.events.get_nowait()
        except queue.Empty:
            return

    def _take_until(self, seconds: float, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not enough() and time.monotonic() < deadline:
            self._take(_LOOK_SECONDS)

    def _handle(self, task: int, message: Message) -> None:
        if message["kind"] == "hello":
            self._members[task] = Member(task, message)
            return
        member = self._members[task]
        match message["kind"]:
            case "gone":
                member.gone_since = time.monotonic()
            case "back":
                member.gone_since = None
            case "replaced":
                self._started_anew = True
            case "log":
                member.last_lines.extend(message["lines"])
                self._tell(self._listener.lines, member.rank, message["lines"])
            case "stacks":
                member.stacks = message["text"]
            case "exit":
                self._end(member, outcome_of_exit(member.rank, member.host, message))
            case kind:
                member.begun, member.last_sign = True, time.monotonic()
                member.signs += kind != "begun"
                if kind == "callback":
                    self._tell(self._listener.callback, member.rank, message["line"])
                elif kind == "report":
                    self._tell(self._listener.report, {**message["fields"], "rank": member.rank})

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:
            _log.exception("a callback of the launcher failed")

    def _end(self, member: Member, outcome: Outcome) -> None:
        if member.outcome is None:
            member.outcome = outcome
            self._outcomes.append(outcome)

    def _lose(self, member: Member, words: str, evidence: str = "") -> None:
        self._end(member, Outcome(member.rank, member.host, "lost", words, None, evidence, tuple(member.last_lines)))

    def _stage_failure(self) -> str | None:
        # Spark does so where it took an executor back; whether there is a further attempt is the runner's to say.
        return "Spark has started the stage anew" if self._started_anew else self._stage.failure()

    def _look_at_stage(self) -> None:
        """Spark has ended the tasks: the first that is gone is the cause, the others were swept along."""
        reason = self._stage_failure()
        if reason is None:
            return
        self._take_until(_CONSEQUENCES_SECONDS, lambda: not self._open())
        open_members = self._open()
        if not open_members or any(outcome.kind != "finished" for outcome in self._outcomes):
            return
        first = min(open_members, key=lambda member: member.gone_since or math.inf)
        # The task of a rank whose channel broke has told Spark alone.
        evidence = reason if "Traceback" in reason else ""
        self._lose(first, f"lost: its Spark task is gone ({_short(reason)})", evidence)

    def _look_for_lost(self) -> None:
        now = time.monotonic()
        for member in self._open():
            gone = member.gone_since is not None and now - member.gone_since > _GONE_SECONDS
            if not gone and self._channel.seconds_silent(member.task) < _SILENT_SECONDS:
                continue
            if now - member.last_probe < _SILENT_SECONDS:
                continue
            if _reachable(member.hello["probe"]):
                _log.warning("rank %d is silent but its task is there: the run goes on", member.rank)
            else:
                self._lose(member, "lost: neither its Spark task nor its host answers")
            member.last_probe = time.monotonic()

    def _look_for_hang(self) -> None:
        open_members = self._open()
        if not open_members:
            return
        now, latest = time.monotonic(), max(member.last_sign for member in self._members.values())
        hung = False
        for member in open_members:
            if not member.begun:
                limit, since = self._start_timeout, member.last_sign
            elif self._hang_timeout is not None:
                # A rank that never reports is judged by those that do.
                limit, since = self._hang_timeout, member.last_sign if member.signs else latest
            else:
                continue
            hung = hung or now - since > limit
        if not hung:
            return
        for member in open_members:
            self._channel.send(member.task, {"kind": "stacks"})
        self._take_until(_STACKS_SECONDS, lambda: all(m.stacks is not None or m.outcome for m in open_members))
        # The others wait for it inside a collective operation.
        suspects = [m for m in self._open() if not _waits_in_collective(m.stacks or "")] or self._open()
        if suspects:
            member = min(suspects, key=lambda m: (m.begun, m.signs, m.last_sign))
            seconds = time.monotonic() - member.last_sign
            words = f"hung: no sign of life for {seconds:.0f} s, after {member.signs} steps or reports"
            stacks = member.stacks or ""
            lines = tuple(member.last_lines)
            self._end(member, Outcome(member.rank, member.host, "hung", words, None, stacks, lines))

    def _settle(self) -> None:
        """After the first failure: let the cause and its consequences be told, then stop what is left."""
        caused = any(outcome.kind not in ("finished", "consequence") for outcome in self._outcomes)
        hung = any(outcome.kind == "hung" for outcome in self._outcomes)
        if not caused:
            self._take_until(_CAUSE_SECONDS, lambda: not self._open() or self._caused())
        if not hung:
            self._take_until(_CONSEQUENCES_SECONDS, lambda: not self._open())
        self.stop()
        self._take_until(_STOP_SECONDS, lambda: all(m.gone_since is not None for m in self._open()))
        for member in self._open():
            # A cut-off host is found out here where its peers were faster than the silence.
            if self._caused() or _reachable(member.hello["probe"]):
                self._end(member, Outcome(member.rank, member.host, "stopped", "stopped because another rank failed"))
            else:
                self._lose(member, "lost: neither its Spark task nor its host answers")

    def _caused(self) -> bool:
        return any(outcome.kind in ("exception", "died", "hung", "lost") for outcome in self._outcomes)


def _reachable(probe: list[Any] | None) -> bool:
    """Whether a task's own port answers: it does as long as its process lives and its host has a network."""
    return probe is None or answers(*probe)


def _short(reason: str) -> str:
    match = re.search(r"(rank \d+ failed: |ExecutorLostFailure|Python worker exited|TaskKilled)[^\n]*", reason)
    return (match[0] if match else reason.splitlines()[0])[:_MAXIMUM_REASON]


def _waits_in_collective(stacks: str) -> bool:
    match = re.search(r'Current thread[^\n]*\n\s*File "([^"]+)"', stacks)
    return match is not None and ("/tensorflow/" in match[1] or "/horovod/" in match[1])
