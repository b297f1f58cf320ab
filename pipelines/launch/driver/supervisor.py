"""The driver's view of one attempt: which tasks have connected, how ranks ended, and which are lost or hang."""

import logging
import queue
import time
from collections.abc import Callable, Sequence

from pipelines.launch.driver.failure import (
    STOPPED,
    Outcome,
    StartError,
    failure_of,
    outcome_of_death,
    outcome_of_exit,
    with_early_return,
)
from pipelines.launch.driver.hangs import is_hanging, suspect
from pipelines.launch.driver.joining import JoinRounds
from pipelines.launch.driver.members import AttemptMember, AttemptMembers, Tasks, short_reason
from pipelines.launch.driver.probes import HostProbes, is_probe_due, is_silent
from pipelines.launch.driver.rank_output import RankOutput
from pipelines.launch.driver.status import first_gone, stop_state
from pipelines.launch.policy import TimeLimits
from pipelines.launch.wire.channel import DriverChannel
from pipelines.launch.wire.messages import (
    Disconnected,
    EndProcess,
    Event,
    FunctionStarted,
    Hello,
    Join,
    LogPart,
    MessagesDropped,
    ProcessDied,
    ProcessExit,
    ReadyToJoin,
    Reconnected,
    Report,
    RunRank,
    SendStacks,
    ShownLine,
    SignOfLife,
    SigtermReceived,
    Stacks,
    StepDone,
    Stop,
    StopSoon,
    TaskRestarted,
)

_LOOK_SECONDS = 0.1
_PAUSED_SECONDS = 2.0
CONSEQUENCES_SECONDS = 1.0
"""Survivors notice the end of a rank within 0.1 s; the message of the rank that caused it may take longer."""
LAST_REPORTS_SECONDS = 10.0
"""Seconds that reports may take to arrive after the results."""
_CAUSE_SECONDS = 10.0
_STOP_SECONDS = 5.0
_STACKS_SECONDS = 4.0
_PROBE_SECONDS = 10.0
_GRACE_TOLERANCE_SECONDS = 2.0
_LOST = "lost: neither its Spark task nor its host answers"
_log = logging.getLogger(__name__)


class Supervisor:
    """Gathers the tasks of one attempt, starts their ranks, and watches until all have finished or one has failed."""

    def __init__(
        self,
        channel: DriverChannel,
        tasks: Tasks,
        size: int,
        output: RankOutput,
        limits: TimeLimits,
        joining: JoinRounds,
    ) -> None:
        """Store the arguments; nothing starts yet."""
        self._channel, self._tasks, self._size, self._output, self._limits = channel, tasks, size, output, limits
        self._joining = joining
        self._members = AttemptMembers()
        self._started_twice = False
        self._stop_reason: str | None = None
        self._stop_deadline: float | None = None
        self._awake_since = self._last_look = time.monotonic()
        self._probes = HostProbes(channel.seconds_silent)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop soon; may be called by a signal handler."""
        self._stop_reason = self._stop_reason or reason

    def gather(self) -> list[Hello]:
        """Wait for all tasks, and return their `Hello` messages, by task.

        Raises:
            StartError: A task did not connect in time or cannot run, or the job was asked to stop.
        """
        deadline = time.monotonic() + self._limits.start
        while len(self._members.by_task) < self._size:
            self._take(_LOOK_SECONDS)
            missing = f"{self._size - len(self._members.by_task)} of {self._size} tasks have not reached the driver"
            if (reason := self._failure()) is not None:
                raise StartError(f"{missing}: {short_reason(reason)}")
            if self._stop_reason is not None:
                raise StartError(f"{missing}: {self._stop_reason}")
            if time.monotonic() > deadline:
                address = self._channel.address
                raise StartError(
                    f"{missing} at {address.host}:{address.port} after start_timeout={self._limits.start:g} s: do "
                    "executors reach that address (spark.driver.host)? Do their tasks start?"
                )
        for task, member in self._members.by_task.items():
            member.first_probe = self._probes.begin(task, member.hello)
        return [self._members.by_task[task].hello for task in range(self._size)]

    @property
    def unreachable_hosts(self) -> set[str]:
        """The hosts of executors that can connect to this driver but not be reached from it."""
        return set(self._probes.unreachable_hosts)

    def go(self, orders: Sequence[RunRank]) -> None:
        """Send each task its order to run its rank."""
        for task, member in self._members.by_task.items():
            member.rank, member.last_sign = orders[task].rank, time.monotonic()
            self._channel.send(task, orders[task])

    def stop(self) -> None:
        """Tell all tasks to end their processes now."""
        for task in self._members.by_task:
            self._channel.send(task, Stop())

    def close(self) -> None:
        """End the threads that probe hosts."""
        self._probes.close()

    def watch(self) -> None:
        """Return when all ranks have finished.

        Raises:
            WorkerError: The function raised an exception in a rank; all other ranks have been stopped.
            RankLostError: A rank ended in another way; all other ranks have been stopped.
        """
        while True:
            tasks_ended = self._tasks.finished()
            self._take(_LOOK_SECONDS)
            self._look_at_tasks()
            self._look_for_lost()
            self._look_for_hang()
            self._look_for_late()
            self._pass_stop_on()
            if "finished" in self._members.status().ends:
                self._members.end_before(self._joining.deaths)  # a spare would wait forever for a finished rank
                self._end_waiting()
            match self._members.status().state(tasks_ended=tasks_ended):
                case "failed":
                    self._settle()
                    raise failure_of(self._members.outcomes)
                case "ended":
                    return self._take_last_reports()
                case "requested":
                    raise failure_of(self._members.outcomes)
                case "finished":
                    return None

    def _take(self, seconds: float) -> bool:
        """Handle queued events, or wait a while for one; return whether there was one.

        This also returns if callbacks are slower than the events, because a rank may have failed.
        """
        self._forgive_own_pause()
        try:
            task, event = self._channel.events.get(timeout=seconds)
        except queue.Empty:
            return False
        until = time.monotonic() + _LOOK_SECONDS
        self._handle(task, event)
        while time.monotonic() < until and not self._channel.events.empty():
            self._handle(*self._channel.events.get())
        return True

    def _take_last_reports(self) -> None:
        """Handle the messages that still arrive after all tasks have ended.

        A rank whose channel broke has sent no message that it finished: Spark delivered its result.
        """
        heard = time.monotonic()
        while any(each.gone_since is None for each in self._members.open):
            if self._take(_LOOK_SECONDS):
                heard = time.monotonic()
            elif time.monotonic() - heard > LAST_REPORTS_SECONDS:
                return

    def _take_until(self, seconds: float, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not enough() and time.monotonic() < deadline:
            self._take(_LOOK_SECONDS)

    def _handle(self, task: int, event: Event) -> None:
        if isinstance(event, Hello):
            self._members.by_task[task] = AttemptMember(event)
            return
        member = self._members.by_task[task]
        match event:
            case Disconnected():
                member.gone_since = time.monotonic()
            case Reconnected():
                member.gone_since = None
            case TaskRestarted():
                self._started_twice = True
            case LogPart(lines=lines):
                member.last_lines.extend(lines)
                self._output.lines(member.rank, lines)
            case Stacks(text=text):
                member.stacks = text
            case SigtermReceived():
                self.request_stop(f"the task of rank {member.rank} on {member.host} received SIGTERM")
            case MessagesDropped(count=count):
                _log.warning(
                    "%d reports and lines of rank %d are lost: it sent them faster than the driver took them",
                    count,
                    member.rank,
                )
            case ProcessExit():
                outcome = outcome_of_exit(member.rank, member.host, event)
                if outcome.kind == "stopped" and self._grace_is_over():
                    self._outlast_grace(member)
                self._members.end(member, outcome)  # the first end of a rank counts
            case ProcessDied():
                self._replace(task, member, event)
            case ReadyToJoin(progress=progress, joins=joins):
                member.has_begun, member.last_sign = True, time.monotonic()
                if (environment := self._joining.take(task, progress, joins)) is not None:
                    for each in self._members.by_task:
                        self._channel.send(each, Join(environment))
            case FunctionStarted() | StepDone() | Report() | ShownLine():
                self._sign(member, event)

    def _replace(self, task: int, member: AttemptMember, event: ProcessDied) -> None:
        """Let the spare take over from a dead process, unless earlier replacements made no progress."""
        outcome = outcome_of_death(member.rank, member.host, event)
        member.has_begun, member.last_sign = False, time.monotonic()
        if not self._joining.is_replaced(task, outcome) or self._members.outcomes:
            self._members.end(member, outcome)

    def _sign(self, member: AttemptMember, event: SignOfLife) -> None:
        member.has_begun, member.last_sign = True, time.monotonic()
        member.signs += not isinstance(event, FunctionStarted)
        match event:
            case ShownLine(line=line):
                self._output.shown_line(member.rank, line)
            case Report(fields=fields):
                self._output.report(member.rank, fields)

    def _failure(self) -> str | None:
        # Spark starts tasks again if it took an executor away; only the runner makes further attempts.
        return "Spark has started the stage a second time" if self._started_twice else self._tasks.failure()

    def _forgive_own_pause(self) -> None:
        """Do not count a time in which the driver was suspended or a callback was slow: it received nothing then."""
        now = time.monotonic()
        pause, self._last_look = now - self._last_look, now
        if pause < _PAUSED_SECONDS:
            return
        self._awake_since = now
        self._joining.forgive(pause)
        self._members.forgive(pause)

    def _look_at_tasks(self) -> None:
        """Record the first task that is gone as the cause if Spark has ended the tasks; the others ended with it."""
        reason = self._failure()
        if reason is None:
            return
        for _ in range(self._channel.events.qsize()):  # queued events may say which rank failed first, and how
            self._take(0)
        self._take_until(CONSEQUENCES_SECONDS, lambda: not self._members.open)
        status = self._members.status()
        if not status.open_ranks or any(end != "finished" for end in status.ends):
            return
        first = self._members.by_task[first_gone(status.open_ranks).task]
        # A task whose channel broke can report its failure to Spark only.
        evidence = reason if "Traceback" in reason else ""
        self._members.end_as(first, "lost", f"lost: its Spark task is gone ({short_reason(reason)})", evidence)

    def _look_for_lost(self) -> None:
        """Probe the hosts of silent tasks, all at once, while messages are handled."""
        now = time.monotonic()
        for task, member in self._members.by_task.items():
            if member.outcome is not None:
                continue
            if member.probe is None:
                if self._is_silent(task, member, now) and is_probe_due(now - member.last_probe):
                    member.probe = self._probes.probe(member)
            elif member.probe.done():
                answered, member.probe, member.last_probe = member.probe.result(), None, now
                if answered:
                    _log.warning("rank %d is silent but its task is alive: the run continues", member.rank)
                elif self._is_silent(task, member, now):
                    self._members.end_as(member, "lost", _LOST)

    def _is_silent(self, task: int, member: AttemptMember, now: float) -> bool:
        seconds_gone = None if member.gone_since is None else now - member.gone_since
        return is_silent(seconds_gone, min(self._channel.seconds_silent(task), now - self._awake_since))

    def _look_for_hang(self) -> None:
        members, status = self._members.open, self._members.status()
        if not members or self._joining.waits or not is_hanging(status, status.open_ranks, self._limits):
            return
        self._ask_for_stacks(list(self._members.by_task))
        # By now, signs of life that were in transit have been handled.
        status = self._members.status()
        if is_hanging(status, status.open_ranks, self._limits):
            rank = suspect(status.open_ranks)
            silent = status.now - rank.last_sign
            words = f"hung: no sign of life for {silent:.0f} s, after {rank.signs} steps or reports"
            words += "".join(f"; rank {finished} has returned" for finished in self._members.finished[:1])
            self._members.end_as(self._members.by_task[rank.task], "hung", words, rank.stacks)

    def _look_for_late(self) -> None:
        """Replace ranks that others wait for after half of the time that a start may take; end them after all of it."""
        seconds = self._limits.start
        for task in sorted(self._joining.late(seconds / 2)):
            self._ask_for_stacks([task])
            if task in self._joining.missing(seconds / 2):  # it may be ready by now
                member = self._members.by_task[task]
                _log.warning(
                    "rank %d hangs: the others have waited for it to join for %g s; its process is ended\n%s",
                    member.rank,
                    seconds / 2,
                    member.stacks,
                )
                self._channel.send(task, EndProcess())
        for task in sorted(self._joining.missing(seconds)):
            words = f"hung: the other ranks have waited for it to join for {seconds:g} s"
            member = self._members.by_task[task]
            self._members.end_as(member, "hung", words, member.stacks or "")

    def _ask_for_stacks(self, tasks: Sequence[int]) -> None:
        """Ask these tasks for the stacks of their ranks, and wait a while for all answers."""
        members = [self._members.by_task[task] for task in tasks]
        for task, member in zip(tasks, members, strict=True):
            member.stacks = None
            self._channel.send(task, SendStacks())
        self._take_until(_STACKS_SECONDS, lambda: all(m.stacks is not None or m.outcome for m in members))

    def _pass_stop_on(self) -> None:
        """Ask the ranks to stop if there is a reason, and end those that still run after the grace period."""
        if (reason := self._tasks.stop_reason()) is not None:
            self.request_stop(reason)
        match stop_state(self._stop_reason, self._stop_deadline, time.monotonic()):
            case "due":
                grace = self._limits.stop_grace
                self._stop_deadline = time.monotonic() + grace
                _log.warning("%s: all ranks are asked to stop within %g s", self._stop_reason, grace)
                for task in self._members.by_task:
                    self._channel.send(task, StopSoon())
            case "over":
                for member in self._members.open:
                    self._outlast_grace(member)
                self.stop()

    def _grace_is_over(self) -> bool:
        """Return whether the grace period after the request to stop is over; tasks also measure it themselves."""
        return self._stop_deadline is not None and time.monotonic() > self._stop_deadline - _GRACE_TOLERANCE_SECONDS

    def _outlast_grace(self, member: AttemptMember) -> None:
        words = f"still ran {self._limits.stop_grace:g} s after it was asked to stop ({self._stop_reason})"
        self._members.end_as(member, "requested", words)

    def _settle(self) -> None:
        """Wait for the cause and the consequences of the first failure, then stop the remaining ranks."""
        # Ranks that were replaced died before the event that ended the attempt: their death may have caused it.
        self._members.end_before(self._joining.deaths)
        status = self._members.status()
        if status.waits_for_cause:
            self._take_until(_CAUSE_SECONDS, lambda: not self._members.open or self._members.status().is_caused)
        if status.waits_for_consequences:
            self._take_until(CONSEQUENCES_SECONDS, lambda: not self._members.open)
        self.stop()
        self._take_until(_STOP_SECONDS, lambda: all(member.gone_since is not None for member in self._members.open))
        # This finds a disconnected host whose peers failed before its silence reached the limit.
        unknown = [] if self._members.status().is_caused else self._members.open
        probes = [(member, self._probes.probe(member)) for member in unknown]
        self._take_until(_PROBE_SECONDS, lambda: all(probe.done() for _, probe in probes))
        for member, probe in probes:
            if probe.done() and not probe.result():
                self._members.end_as(member, "lost", _LOST)
        if not self._members.open and self._stop_reason is None:  # otherwise a lost task or the request is the cause
            self._members.outcomes = with_early_return(self._members.outcomes)
        for member in self._members.open:
            self._members.end(member, Outcome(member.rank, member.host, "stopped", STOPPED))

    def _end_waiting(self) -> None:
        """End the ranks that wait to join a rank that has finished: they would wait forever."""
        for task in self._joining.ready:
            words = f"hung: it waits to join rank {self._members.finished[0]}, whose function has returned"
            self._members.end_as(self._members.by_task[task], "hung", words)
