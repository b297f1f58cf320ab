"""Two ranks trace some steps; the training is the same as without a trace."""

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import mlflow
import numpy as np
import pytest

from jobs.train import TrainedRun

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

FIRST, LAST = 3, 6  # the second epoch begins with step 5
CODEC = ("exchange.codec=onebit", "exchange.dense_below=0")


def test_two_ranks_trace_their_steps_on_one_clock(
    train_small: Callable[..., TrainedRun],
    mlflow_store: str,
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    plain = train_small(*CODEC)
    assert not (plain.folder / "trace.json").exists()
    traced = train_small(*CODEC, f"training.trace_steps=[{FIRST}, {LAST}]", "training.tensorflow_profiler=true")
    np.testing.assert_equal(weights(traced), weights(plain))

    artifact = mlflow.artifacts.download_artifacts(f"runs:/{traced.run.run_id}/trace.json", tracking_uri=mlflow_store)
    assert Path(artifact).read_text() == (traced.folder / "trace.json").path.read_text()
    client = mlflow.MlflowClient(mlflow_store)
    for rank in (0, 1):
        assert client.list_artifacts(traced.run.run_id, f"profile/rank-{rank}/plugins/profile")
    trace = json.loads(Path(artifact).read_text())
    assert all(error is not None for error in trace["otherData"]["largest_clock_error_ms_by_rank"])

    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    of_ranks = [event for event in events if event["pid"] < 2]
    for rank in (0, 1):
        own = [event for event in of_ranks if event["pid"] == rank]
        for phase in ("step", "input", "compute", "encode", "wire", "decode", "optimizer"):
            steps = {event["args"]["step"] for event in own if event["cat"] == phase}
            assert steps == set(range(FIRST, LAST + 1)), (rank, phase)
        # In the middle of the steps an epoch ends.
        (between,) = (e for e in own if e["cat"] == "between" and e["args"]["step"] == 5)
        assert between["dur"] > 0
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise([e for e in own if e["cat"] == "step"]))
    assert any(event["args"].get("tensors") for event in of_ranks if event["cat"] == "encode")

    # An exchange ends on no rank before it has begun on the other one.
    exchanges = defaultdict(list)
    for event in of_ranks:
        if event["cat"] == "wire":
            exchanges[event["args"]["step"], event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    assert exchanges
    error = 1000 * sum(trace["otherData"]["largest_clock_error_ms_by_rank"])  # microseconds
    for (start, end), (other_start, other_end) in exchanges.values():
        assert max(start, other_start) <= min(end, other_end) + error

    # Horovod's own timeline lies within the steps.
    horovod = [event for event in events if event["pid"] == 2]
    assert {"ALLTOALL", "ALLREDUCE"} <= {event["name"] for event in horovod}
    first, last = min(e["ts"] for e in of_ranks), max(e["ts"] + e["dur"] for e in of_ranks)
    inside = [event for event in horovod if first - error <= event["ts"] <= last + error]
    assert len(inside) >= 0.9 * len(horovod)
