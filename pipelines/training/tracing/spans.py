"""The parts of steps and their times on one clock, as a Chrome trace; this module imports no TensorFlow."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

TRACE_FILE = "trace.json"
"""The file name of the trace, beside the checkpoints and among the artifacts of the run."""
ROWS = {
    "step": "whole steps",
    "input": "waiting for the next batch",
    "compute": "forward and backward pass",
    "encode": "encoding gradients",
    "wire": "sending and receiving",
    "decode": "decoding what was received",
    "optimizer": "the update of the weights",
    "between": "between two steps: records, reports, validation, checkpoints",
}
"""The rows of a rank in order, with their meaning. The row `wire` also shows `waiting`, for the slowest rank."""
_LANES = 100
"""Maximum number of rows of a phase whose parts overlap."""
_MICRO = 1e6

Event = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """One part of one step on one rank."""

    phase: str
    """A key of `ROWS`, or `waiting`."""
    name: str
    start: float
    """Seconds since 1970, by the clock of its rank."""
    end: float
    step: int
    """Number of the optimizer step, from 1."""
    tensors: Sequence[str] = ()
    """Variables whose gradients the span handles."""


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank."""

    spans: tuple[Span, ...]
    host: str
    offset: float
    """Seconds to add to its times to get those of rank 0."""
    error: float
    """Largest error of the offset, in seconds."""

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "RankTrace":
        """Return the trace from what JSON makes of `dataclasses.asdict`."""
        return cls(**{**values, "spans": tuple(Span(**span) for span in values["spans"])})


def chrome_trace(ranks: Sequence[RankTrace], horovod: Sequence[Event], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of all ranks in Chrome's format, which Perfetto also reads.

    A process is a rank, and a thread is a phase. A phase whose parts overlap has several threads. One more process is
    Horovod's timeline. Times are microseconds of rank 0's clock since the first event. The time of a rank in an
    exchange before all ranks have joined it is waiting:

        waiting(rank) = [start(rank), the last start of all ranks], named after that rank;  wire(rank) = the rest

    Args:
        ranks: Spans of each rank, in rank order.
        horovod: Complete events of Horovod's timeline, with seconds of rank 0's clock in `ts` and `dur`.
        about: Further facts to write into the file.

    Source: Google, "Trace event format".
    """
    spans = _with_waiting(
        [
            [replace(span, start=span.start + rank.offset, end=span.end + rank.offset) for span in rank.spans]
            for rank in ranks
        ]
    )
    starts = [span.start for each in spans for span in each] + [event["ts"] for event in horovod]
    origin = min(starts, default=0.0)
    events: list[Event] = []
    names: list[Event] = []
    for rank, (trace, own) in enumerate(zip(ranks, spans, strict=True)):
        names += _named("process", rank, 0, f"rank {rank} on {trace.host}", rank)
        events += [_complete(span, rank, thread, origin) for span, thread in _threads(own)]
        for thread in sorted({event["tid"] for event in events if event["pid"] == rank}):
            row, lane = list(ROWS)[thread // _LANES], thread % _LANES
            names += _named("thread", rank, thread, f"{row} {lane + 1}" if lane else row, thread)
    if horovod:
        names += _named("process", len(ranks), 0, "Horovod's timeline of rank 0", len(ranks))
        for thread, name in sorted({(event["tid"], event["args"]["tensor"]) for event in horovod}):
            names += _named("thread", len(ranks), thread, name, thread)
        events += [
            {**event, **_times(event["ts"] - origin, event["ts"] + event["dur"] - origin), "pid": len(ranks)}
            for event in horovod
        ]
    errors = [1000 * rank.error if math.isfinite(rank.error) else None for rank in ranks]
    return {
        # Of two that begin together the longer one is around the other.
        "traceEvents": names + sorted(events, key=lambda event: (event["ts"], -event["dur"])),
        "displayTimeUnit": "ms",
        "otherData": {**about, "clock": "of rank 0", "largest_clock_error_ms_by_rank": errors, "rows": ROWS},
    }


def _with_waiting(spans: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Divide what is sent into the wait for the last rank and the rest."""
    starts: dict[tuple[int, str], list[float]] = defaultdict(list)
    for own in spans:
        for span in own:
            if span.phase == "wire":
                starts[span.step, span.name].append(span.start)
    divided: list[list[Span]] = []
    for own in spans:
        divided.append([])
        for span in own:
            begins = starts[span.step, span.name] if span.phase == "wire" else []
            last = min(max(begins), span.end) if len(begins) == len(spans) > 1 else span.start
            if last > span.start:
                slowest = begins.index(max(begins))
                divided[-1].append(replace(span, phase="waiting", name=f"waiting for rank {slowest}", end=last))
            divided[-1].append(replace(span, start=last))
    return divided


def _threads(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Assign each span the first free thread of its phase."""
    rows = list(ROWS)
    free: dict[str, list[float]] = defaultdict(list)
    found = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        phase = "wire" if span.phase == "waiting" else span.phase
        ends = free[phase]
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        found.append((span, rows.index(phase) * _LANES + min(lane, _LANES - 1)))
    return found


def _complete(span: Span, process: int, thread: int, origin: float) -> Event:
    arguments: dict[str, Any] = {"step": span.step}
    if span.tensors:
        arguments["tensors"] = list(span.tensors)
    return {
        "name": span.name,
        "cat": span.phase,
        "ph": "X",
        "pid": process,
        "tid": thread,
        **_times(span.start - origin, span.end - origin),
        "args": arguments,
    }


def _times(start: float, end: float) -> dict[str, float]:
    """Return microseconds, rounded so that adjacent spans stay adjacent."""
    begin = round(_MICRO * start, 1)
    return {"ts": begin, "dur": round(round(_MICRO * end, 1) - begin, 1)}


def _named(kind: str, process: int, thread: int, name: str, position: int) -> list[Event]:
    """Return the events that set the name and the position of a process or a thread."""
    of = {"ph": "M", "pid": process, "tid": thread}
    return [
        {"name": f"{kind}_name", **of, "args": {"name": name}},
        {"name": f"{kind}_sort_index", **of, "args": {"sort_index": position}},
    ]
