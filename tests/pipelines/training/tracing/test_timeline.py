from pathlib import Path

import pytest

from pipelines.training.tracing.timeline import read_timeline

# As Horovod 0.28.1 writes it: tensors are processes, microseconds since the start, which the first line has.
TEXT = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1700000000000000}},
{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "gradients_0"}},
{"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1000, "pid": 1},
{"ph": "X", "name": "1", "ts": 1400, "pid": 1, "dur": 0},
{"ph": "E", "ts": 1500, "pid": 1},
{"ph": "B", "name": "ALLREDUCE", "ts": 1500, "pid": 1},
{"ph": "B", "name": "GLOO_ALLREDUCE", "ts": 1600, "pid": 1},
{"ph": "E", "ts": 2600, "pid": 1},
{"ph": "E", "ts": 2700, "pid": 1, "args": {"dtype": "float32"}},
{"ph": "i", "name": "CYCLE_START", "ts": 2750, "s": "g"},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 2800, "pid": 1}]"""


def test_pairs_become_events_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    file.write_text(TEXT)
    events = read_timeline(file)
    names = ("rank 1 is ready", "NEGOTIATE_ALLREDUCE", "GLOO_ALLREDUCE", "ALLREDUCE")
    assert [(event["name"], event["ph"], event["args"]["tensor"]) for event in events] == [
        (name, "X", "gradients_0") for name in names
    ]
    instant, *_, whole = events
    assert (whole["ts"], whole["dur"], instant["dur"]) == (
        pytest.approx(1.7e9 + 0.0015, abs=1e-6),
        pytest.approx(0.0012, abs=1e-6),
        0,
    )


def test_a_timeline_without_events(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert [read_timeline(tmp_path / name) for name in ("missing", "empty")] == [[], []]
