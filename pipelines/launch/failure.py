"""How each rank of a failed run ended, which of them is the cause, and how that is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

Kind = Literal["finished", "exception", "died", "hung", "lost", "consequence", "stopped"]

# What Horovod and Gloo say in a rank whose peer is gone.
_CONSEQUENCES = ("Horovod has been shut down", "gloo/transport", "Connection closed by peer", "HorovodInternalError")
_ABORTED_WITH_GLOO = ("gloo::", "gloo/transport")
_HEADINGS = ("rank", "host", "outcome")
_TABLE_WIDTH = 100
_STOPPED = "stopped because another rank failed"


@dataclass(frozen=True)
class Outcome:
    """One rank's end."""

    rank: int
    host: str
    kind: Kind
    summary: str
    exit_code: int | None = None
    """Negative: the number of a signal; None: not known, or the process was ended by us."""
    traceback: str = ""
    """Python's, where there is one: of an exception, a crash or a hang."""
    last_lines: tuple[str, ...] = ()


class InfrastructureError(RuntimeError):
    """No exception of the user's function is the cause: another attempt may succeed."""


class StartError(InfrastructureError):
    """Not all ranks of an attempt have started."""


class WorkerError(RuntimeError):
    """The user's function raised an exception in a rank, which is the root cause of the failure.

    The text names the rank that failed first with its traceback, and has a table of all ranks.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        """Take the outcomes in the order in which they became known."""
        self.outcomes, self.root = _sorted(outcomes), root_cause(outcomes)
        super().__init__(describe(self.root, self.outcomes))


class RankLostError(InfrastructureError):
    """A rank died, hung, was lost or was asked to stop, which is the root cause of the failure.

    The text names the rank that failed first with its last lines, and has a table of all ranks.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        """Take the outcomes in the order in which they became known."""
        self.outcomes, self.root = _sorted(outcomes), root_cause(outcomes)
        super().__init__(describe(self.root, self.outcomes))


def failure_of(outcomes: Sequence[Outcome]) -> WorkerError | RankLostError:
    """The error for outcomes of which at least one is a failure, in the order in which they became known."""
    is_exception = root_cause(outcomes).kind == "exception"
    return WorkerError(outcomes) if is_exception else RankLostError(outcomes)


def _sorted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def root_cause(outcomes: Sequence[Outcome]) -> Outcome:
    """The first, in order of arrival, that is not explained by another rank's end."""
    by_weight = (
        [outcome for outcome in outcomes if outcome.kind in kinds]
        for kinds in (("exception", "died", "hung", "lost"), ("consequence",), ("stopped", "finished"))
    )
    return next(group[0] for group in by_weight if group)


def outcome_of_exit(rank: int, host: str, message: dict[str, Any]) -> Outcome:
    """What a task tells about the end of its process, judged."""
    failure, lines = message["failure"], tuple(message["last_lines"])
    code: int | None = message["exit_code"]
    if failure is not None:
        summary = f"{failure['error']}: {failure['message']}" if failure["message"] else str(failure["error"])
        said = next((text for text in _CONSEQUENCES if text in summary), None)
        if said is not None:
            return Outcome(rank, host, "consequence", f"{failure['error']}: {said}", code, failure["traceback"], lines)
        return Outcome(rank, host, "exception", summary, code, failure["traceback"], lines)
    if message["stopped"]:
        return Outcome(rank, host, "stopped", _STOPPED, None, "", lines)
    if message["finished"] and code == 0:
        return Outcome(rank, host, "finished", "finished", 0, "", lines)
    aborted = message["death"] == "killed by SIGABRT" and any(
        text in line for line in lines for text in _ABORTED_WITH_GLOO
    )
    kind: Kind = "consequence" if aborted else "died"
    words = message["death"] + (" after the function had returned" if message["finished"] else "")
    return Outcome(rank, host, kind, words, code, message["faults"], lines)


def describe(root: Outcome, outcomes: Sequence[Outcome]) -> str:
    """The whole error: one line, the table, the root cause's traceback and last lines."""
    parts = [f"rank {root.rank} on {root.host} failed: {root.summary}", outcome_table(root, outcomes)]
    if root.traceback:
        title = "Stacks" if root.kind in ("hung", "died") else "Traceback"
        parts.append(f"{title} of rank {root.rank}:\n{root.traceback.rstrip()}")
    if root.last_lines:
        parts.append(f"Last lines of rank {root.rank}:\n" + "\n".join(root.last_lines))
    return "\n\n".join(part for part in parts if part)


def outcome_table(root: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Rank, host, outcome; neighbours with the same end share a line. Nothing for a single rank."""
    if len(outcomes) < 2:
        return ""
    rows = [_HEADINGS]
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
