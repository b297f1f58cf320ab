"""The outcome of each rank of a failed job, the root cause, and the text of the error."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from pipelines.launch.rank.membership import NO_COMMON_STATE
from pipelines.launch.wire.messages import FunctionFailure, ProcessDied, ProcessExit

Kind = Literal["finished", "exception", "died", "hung", "lost", "requested", "consequence", "stopped", "returned"]
"""`requested`: the rank was asked to stop. `stopped`: it was ended because another rank failed. `returned`: it finished
while another rank waited for it."""
CAUSES: tuple[Kind, ...] = ("exception", "died", "hung", "lost")

# Messages of Horovod and Gloo in a rank when another rank has ended.
_CONSEQUENCES = (
    "Horovod has been shut down",
    "Horovod initialization failed",
    "gloo/transport",
    "Connection closed by peer",
    "HorovodInternalError",
)
_OF_A_DEATH = (*_CONSEQUENCES, NO_COMMON_STATE)
_ABORTED_WITH_GLOO = ("gloo::", "gloo/transport")
_GRAPH_TRACE = re.compile(r"Graph execution error:\n.*?\n([^\n]+)\n\s*\[\[\{\{node [^\n]*", re.DOTALL)
_AFTER_RETURN = " after the function had returned"
_TABLE_WIDTH = 100
STOPPED = "stopped because another rank failed"


@dataclass(frozen=True)
class Outcome:
    """The end of one rank."""

    rank: int
    host: str
    kind: Kind
    summary: str
    exit_code: int | None = None
    """The exit code. Negative: the number of a signal. None: unknown, or the launcher ended the process."""
    traceback: str = ""
    """Python's traceback of an exception, a crash or a hang; empty if there is none."""
    last_lines: tuple[str, ...] = ()


class InfrastructureError(RuntimeError):
    """A failure that no exception of the user's function caused: another attempt may succeed."""


class StartError(InfrastructureError):
    """The error when not all ranks of an attempt have started."""


class SparkGoneError(InfrastructureError):
    """The JVM of Spark's driver has ended: its SparkSession cannot make another attempt."""

    def __init__(self) -> None:
        """Set the text, which is always the same."""
        super().__init__(
            "Spark's own process on the driver (its JVM) has ended: it was killed or ran out of memory "
            "(spark.driver.memory). Start the job again in a new session"
        )


class _RootCauseError(RuntimeError):
    """An error with the outcome of each rank, and with the root cause."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        """Take the outcomes in the order in which the driver learned them."""
        self.outcomes = sorted(outcomes, key=lambda outcome: outcome.rank)
        self.root = root_cause(outcomes)
        super().__init__(describe(self.root, self.outcomes))


class WorkerError(_RootCauseError):
    """The user's function raised an exception in a rank, or returned while others waited: the root cause.

    The text contains the rank that failed first, its traceback, and a table of all ranks.
    """


class RankLostError(_RootCauseError, InfrastructureError):
    """A rank died, hung, was lost or was asked to stop, which is the root cause of the failure.

    The text contains the rank that failed first, its last lines, and a table of all ranks.
    """


def failure_of(outcomes: Sequence[Outcome]) -> WorkerError | RankLostError:
    """Return the error for outcomes in order of arrival; at least one of them is a failure."""
    return (WorkerError if root_cause(outcomes).kind in ("exception", "returned") else RankLostError)(outcomes)


def root_cause(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the first outcome, in order of arrival, that is no consequence of another rank's end."""
    by_weight = (CAUSES, ("requested", "returned"), ("consequence",), ("stopped", "finished"))
    return next(outcome for kinds in by_weight for outcome in outcomes if outcome.kind in kinds)


def with_early_return(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes, with a rank that has finished as the cause if all failures are consequences of its end."""
    finished, root = [outcome for outcome in outcomes if outcome.kind == "finished"], root_cause(outcomes)
    if not finished or root.kind != "consequence" or _AFTER_RETURN in root.summary:
        return list(outcomes)
    words = f"returned while rank {root.rank} was in a collective operation: all ranks need equal numbers of steps"
    return [replace(each, kind="returned", summary=words) if each is finished[0] else each for each in outcomes]


def outcome_of_exit(rank: int, host: str, end: ProcessExit) -> Outcome:
    """Classify a task's message about the end of its process."""
    lines = tuple(end.last_lines)
    if end.failure is not None:
        kind, summary = _judge(end.failure)
        return Outcome(rank, host, kind, summary, end.exit_code, _without_graph_trace(end.failure.traceback), lines)
    if end.stopped:
        return Outcome(rank, host, "stopped", STOPPED, None, "", lines)
    if end.finished and end.exit_code == 0:
        return Outcome(rank, host, "finished", "finished", 0, "", lines)
    aborted = end.death == "killed by SIGABRT" and any(text in line for line in lines for text in _ABORTED_WITH_GLOO)
    words = end.death + (_AFTER_RETURN if end.finished else "")
    return Outcome(rank, host, "consequence" if aborted else "died", words, end.exit_code, end.faults, lines)


def outcome_of_death(rank: int, host: str, death: ProcessDied) -> Outcome:
    """Return the end of a process whose spare may take its place."""
    return Outcome(rank, host, "died", death.death, death.exit_code, death.faults, tuple(death.last_lines))


def names_lost_peer(text: str) -> bool:
    """Return whether a message says that Horovod broke off because another rank has ended."""
    return any(known in text for known in _CONSEQUENCES)


def _judge(failure: FunctionFailure) -> tuple[Kind, str]:
    if failure.on_request:
        return "requested", f"stopped on request: {failure.message}" if failure.message else "stopped on request"
    said = next((text for text in _OF_A_DEATH if text in failure.message), None)
    if said is not None:
        return "consequence", f"{failure.error}: {said}"
    message = _without_graph_trace(failure.message)
    return "exception", f"{failure.error}: {message}" if message else failure.error


def _without_graph_trace(text: str) -> str:
    """Keep the failure in TensorFlow's errors, and drop the many lines that say where the graph was created."""
    return _GRAPH_TRACE.sub(r"\1", text)


def describe(root: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Return the text of the error: one line, the table, traceback and last lines of the root cause, and all hangs."""
    place = f"rank {root.rank}" if root.kind == "returned" else f"rank {root.rank} on {root.host} failed:"
    parts = [f"{place} {root.summary}", outcome_table(root, outcomes)]
    hung = [outcome for outcome in outcomes if outcome is not root and outcome.kind == "hung"]
    waiting = [outcome for outcome in outcomes if root.kind == "returned" and outcome.kind == "consequence"]
    for outcome in [root, *hung, *waiting[:1]]:
        if outcome.traceback:
            title = "Stacks" if outcome.kind in ("hung", "died") else "Traceback"
            parts.append(f"{title} of rank {outcome.rank}:\n{outcome.traceback.rstrip()}")
    if root.last_lines:
        parts.append(f"Last lines of rank {root.rank}:\n" + "\n".join(root.last_lines))
    return "\n\n".join(part for part in parts if part)


def outcome_table(root: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Return rank, host and outcome; neighbouring ranks with the same outcome share a line. Empty for a single rank."""
    if len(outcomes) < 2:
        return ""
    rows = [("rank", "host", "outcome")]
    for (host, words), group in groupby(outcomes, key=lambda outcome: (outcome.host, _words(root, outcome))):
        ranks = [outcome.rank for outcome in group]
        rows.append((f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]), host, words))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{rank:>{widths[0]}}  {host:<{widths[1]}}  {words}" for rank, host, words in rows)


def _words(root: Outcome, outcome: Outcome) -> str:
    summary = outcome.summary.splitlines()[0]
    if len(summary) > _TABLE_WIDTH:
        summary = summary[: _TABLE_WIDTH - 3] + "..."
    if outcome is root:
        return f"{summary}  <- root cause"
    return f"consequence: {summary}" if outcome.kind == "consequence" else summary
