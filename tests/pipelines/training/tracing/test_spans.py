import json
import math
from collections import defaultdict
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from pipelines.training.tracing.spans import RankTrace, Span, chrome_trace

AHEAD = 10.0  # seconds by which the clock of rank 1 is ahead
TENSORS = ("conv1/kernel",)
HOROVOD = [
    {"name": "ALLREDUCE", "cat": "horovod", "ph": "X", "tid": 3, "ts": 1000.45, "dur": 0.1, "args": {"tensor": "a"}}
]


def traces() -> list[RankTrace]:
    """Two ranks and a step; rank 1 has its gradients 0.2 s later."""
    first = (
        Span("step", "step 7", 1000.0, 1001.0, 7),
        Span("compute", "forward pass", 1000.0, 1000.2, 7),
        Span("compute", "backward pass", 1000.2, 1000.5, 7),
        Span("wire", "bucket 0", 1000.3, 1000.7, 7, TENSORS),
        Span("wire", "bucket 1", 1000.4, 1000.8, 7, TENSORS),
    )
    second = (
        Span("step", "step 7", 1000.1 + AHEAD, 1001.0 + AHEAD, 7),
        Span("wire", "bucket 0", 1000.5 + AHEAD, 1000.7 + AHEAD, 7, TENSORS),
        Span("wire", "bucket 1", 1000.6 + AHEAD, 1000.85 + AHEAD, 7, TENSORS),
    )
    return [RankTrace(first, "a", 0.0, 0.0), RankTrace(second, "b", -AHEAD, 0.0001)]


def made(ranks: list[RankTrace] | None = None) -> dict[str, Any]:
    sent = [RankTrace.of_json(json.loads(json.dumps(asdict(rank)))) for rank in ranks or traces()]
    return json.loads(json.dumps(chrome_trace(sent, HOROVOD, {"codec": "none"})))


def complete(trace: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and all(event[name] == value for name, value in fields.items())
    ]


def test_every_event_has_what_the_format_asks_for() -> None:
    trace, others = made(), {"codec": "none", "largest_clock_error_ms_by_rank": [0.0, pytest.approx(0.1)]}
    assert (trace["displayTimeUnit"], trace["otherData"]) == ("ms", trace["otherData"] | others)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert event.keys() >= {"name", "ph", "pid", "tid", "args"}
    events = complete(trace)
    times = [event["ts"] for event in events]
    assert (times, times[0]) == (sorted(times), 0)
    assert min(event["dur"] for event in events) >= 0
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} == named
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert processes == {0: "rank 0 on a", 1: "rank 1 on b", 2: "Horovod's timeline of rank 0"}
    (sent,) = complete(trace, pid=1, name="bucket 0")
    assert sent["args"] == {"step": 7, "tensors": ["conv1/kernel"]}


def test_events_of_one_thread_never_overlap() -> None:
    threads = defaultdict(list)
    for event in complete(made()):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len([key for key in threads if key[0] == 0]) == 4, "steps, computing, and two buckets at the same time"
    assert all(end <= start for times in threads.values() for (_, end), (start, _) in pairwise(times))


def test_all_ranks_are_on_one_clock_and_the_wait_for_the_slowest_one_is_seen() -> None:
    trace = made()

    def times(**fields: Any) -> list[tuple[float, float]]:
        return [pytest.approx((event["ts"] / 1e6, event["dur"] / 1e6)) for event in complete(trace, **fields)]

    assert (times(pid=0, cat="waiting", name="waiting for rank 1"), times(pid=1, cat="waiting")) == (
        [(0.3, 0.2), (0.4, 0.2)],
        [],
    )
    for bucket, start in (("bucket 0", 0.5e6), ("bucket 1", 0.6e6)):
        first, second = complete(trace, name=bucket)
        assert first["ts"] == second["ts"] == pytest.approx(start)
    assert (times(pid=1, cat="step"), times(pid=2)) == ([(0.1, 0.9)], [(0.45, 0.1)])


def test_a_clock_that_could_not_be_compared_is_said() -> None:
    first, second = traces()
    trace = made([first, RankTrace(second.spans, "b", 0.0, math.inf)])
    assert trace["otherData"]["largest_clock_error_ms_by_rank"] == [0.0, None]


def test_a_rank_alone_waits_for_nobody() -> None:
    trace = made(traces()[:1])
    assert (complete(trace, cat="waiting"), len(complete(trace, cat="wire"))) == ([], 2)
