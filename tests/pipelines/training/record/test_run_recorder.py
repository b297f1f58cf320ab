"""What rank 0 writes while it trains, in a real store."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

from models.compression.exchange.figures import ExchangeFigures
from pipelines.storage.folder import Location
from pipelines.tracking.store import runs
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.checkpoint.in_memory import InMemoryRows
from pipelines.training.record.epoch_metrics import epoch_metrics, totals_after
from pipelines.training.record.phases import FILE_NAME, PhaseTable, divide
from pipelines.training.record.run_recorder import RunRecorder
from pipelines.training.step.loop import EpochResult

TWO_RANKS = divide(np.array([[1.0, 0.1, 0.0, 0.2, 0.0, 0.1, 0.3], [1.0, 0.1, 0.0, 0.1, 0.0, 0.1, 0.2]]))
ONE_RANK = divide(np.array([[2.0, 0.1, 0.0, 0.0, 0.0, 0.1, 0.1]]))
EPOCH = {"train/loss": 0.5, "time/step_seconds": 1.0}
EPOCH |= {f"time/step_{name}_seconds": seconds for name, seconds in TWO_RANKS.mean.items()}


Make = Callable[..., RunRecorder]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Location:
    return Location.at(tmp_path / "checkpoints")


@pytest.fixture
def run(module_mlflow_store: str) -> TrackedRun:
    return runs.start_run("record", None, {}, {})


@pytest.fixture
def record_of(checkpoints: Location) -> Make:
    """Makes the record of a process that trains from a step on."""

    def make(run: TrackedRun, start_step: int = 0, **more: Any) -> RunRecorder:
        return RunRecorder(run, checkpoints, lambda step: 0.1, start_step=start_step, **more)

    return make


def end(record: RunRecorder, step: int) -> None:
    """A checkpoint and the end of the training after a step."""
    record.release(step)
    assert record.write_end({}, {}, steps=step) == ("", "")


def test_a_resumed_training_keeps_where_the_steps_of_earlier_epochs_went(
    run: TrackedRun,
    record_of: Make,
    checkpoints: Location,
    client: MlflowClient,
    artifact_text: Callable[[str, str, str], str],
) -> None:
    first = record_of(run)
    first.write_epoch([EPOCH], {}, TWO_RANKS, step=4)
    first.release(4)
    # It dies before the checkpoint of its second epoch, which the next process repeats, on one rank.
    first.write_epoch([EPOCH, EPOCH], {}, TWO_RANKS, step=8)
    second = record_of(run, 4)
    second.write_epoch([EPOCH, EPOCH], {}, ONE_RANK, step=8)
    second.release(8)
    second.write_epoch([EPOCH] * 3, {}, TWO_RANKS, step=12)
    end(second, 12)
    table = json.loads(artifact_text(run.uri, run.run_id, "where_the_step_goes.json"))
    assert [row[:2] for row in table["data"]] == [[1, 0], [1, 1], [2, 0], [3, 0], [3, 1]]
    compute = table["columns"].index("compute_seconds")
    assert [row[compute] for row in table["data"]] == pytest.approx([0.6, 0.7, 1.8, 0.6, 0.7])
    # A process that trains no epoch draws what the one before may have left out.
    last = record_of(run, 12)
    last.draw_again([EPOCH] * 3, {}, step=12)
    end(last, 12)
    assert {item.path for item in client.list_artifacts(run.run_id)} >= {
        "learning_curves.png",
        "where_the_step_goes.png",
    }
    # Where its file is lost there are no rows of the first epochs, and the right numbers from then on.
    checkpoints.remove(FILE_NAME)
    assert [row["epoch"] for row in PhaseTable(checkpoints, 12).add(ONE_RANK, epoch=4, step=16)] == [4]


@pytest.mark.long
def test_epochs_whose_journal_is_lost_are_written_from_the_checkpoint(
    run: TrackedRun, record_of: Make, client: MlflowClient, tmp_path: Path
) -> None:
    history = [{**EPOCH, "train/loss": loss, "val/f1_micro": 1 - loss} for loss in (0.5, 0.4, 0.3, 0.2)]
    # Without the store the second epoch is in the journal only, which is lost; the third is in the journal that stays.
    away = TrackedRun("", run.run_id)
    for epoch, place in enumerate((run, away, away), 1):
        record = record_of(place, 4 * epoch - 4)
        record.write_epoch(history[:epoch], {}, TWO_RANKS, step=4 * epoch)
        record.release(4 * epoch)
        assert record.write_end({}, {}, steps=4 * epoch)[1] == ("tracking.offline=true" if place is away else "")
        if epoch == 2:
            shutil.rmtree(tmp_path / "journal")
    summary, target = {"summary/parameters": 7.0, "summary/best_value": 0.7}, {"summary/epochs_to_target": 2.0}
    for further in ({}, {}, target):
        resumed = record_of(run, 12)
        resumed.write_absent([{**row, "own_metric_of_before": 1.0} for row in history[:3]], steps=4)
        # As where the model was not logged: a run that is finished again has its summary once, and what is new in it.
        assert resumed.write_end({}, summary | further, steps=12) == ("", "")
    last = record_of(run, 12)
    last.write_absent(history[:3], steps=4)
    last.write_epoch(history, {}, TWO_RANKS, step=16)
    end(last, 16)
    expected = {
        "train/loss": [(4, 0.5), (8, 0.4), (12, 0.3), (16, 0.2)],
        "epoch/train_loss": [(4, 0.5), (8, 0.4), (12, 0.3), (16, 0.2)],
        "val/f1_micro": [(4, 0.5), (8, 0.6), (12, 0.7), (16, 0.8)],
        "time/step_seconds": [(4, 1.0), (8, 1.0), (12, 1.0), (16, 1.0)],
        **{name: [(12, value)] for name, value in (summary | target).items()},
    }
    assert {name: sorted(curve(client, run, name)) for name in expected} == expected
    assert "own_metric_of_before" not in client.get_run(run.run_id).data.metrics


def curve(client: MlflowClient, run: TrackedRun, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.run_id, name)]


def test_curves_by_step_have_no_times_of_a_step_that_compiles(
    run: TrackedRun, record_of: Make, client: MlflowClient
) -> None:
    for start in (0, 4):
        record = record_of(run, start)
        for step in range(start, start + 4):
            if step == 6:  # beside the first step of a process
                record.expect_compiling()
            record.write_step(step, 0.5, ExchangeFigures(*range(6)))
        record.write_steps(start + 4)
        end(record, start + 4)
    times = {"time/encode_seconds": 3, "time/collective_seconds": 4, "time/decode_seconds": 5}
    others = {"exchange/payload_bytes": 0, "exchange/residual_norm": 2, "train/step_loss": 0.5}
    expected = {name: [(step, value) for step in (1, 2, 3, 5, 7)] for name, value in times.items()}
    expected |= {name: [(step, value) for step in range(8)] for name, value in others.items()}
    assert {name: curve(client, run, name) for name in expected} == expected


def test_a_table_that_cannot_be_read_is_begun_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_text("[{")
    assert [row["epoch"] for row in PhaseTable(Location.at(tmp_path), 4).add(ONE_RANK, epoch=2, step=8)] == [2]
    assert f"{FILE_NAME} cannot be read" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_behind_a_url_the_records_of_an_epoch_are_there_before_its_checkpoint(s3_folder: str) -> None:
    place, run = Location(s3_folder) / "run", TrackedRun("", "offline-1")
    RunRecorder(run, place / "checkpoints", lambda step: 0.1, start_step=0).write_epoch([EPOCH], {}, TWO_RANKS, step=4)
    # Its machine is lost between the checkpoint and the next call.
    assert set(place.files()) >= {"checkpoints/phases.json", "journal/rank-0/entries.jsonl"}
    again = RunRecorder(run, place / "checkpoints", lambda step: 0.1, start_step=4)
    again.write_epoch([EPOCH, EPOCH], {}, ONE_RANK, step=8)
    again.release(8)
    assert again.write_end({}, {}, steps=8) == ("", "tracking.offline=true")
    lines = [json.loads(line) for line in place.read("journal/rank-0/entries.jsonl").splitlines()]
    points = [point for line in lines for point in line.get("content", {}).get("points", [])]
    assert [step for name, step, *_ in points if name == "train/loss"] == [4, 8]
    (table,) = (line for line in lines if line.get("path") == "where_the_step_goes.json" and line["after_step"] == 8)
    rows = json.loads(place.read(f"journal/rank-0/files/{table['content']['file']}"))["data"]
    assert [row[:2] for row in rows] == [[1, 0], [1, 1], [2, 0]]


def test_an_epoch_without_steps_has_no_times_of_a_step(record_of: Make, checkpoints: Location) -> None:
    nothing_left = EpochResult(0.5, 0.0, 0.0, measured_steps=0, measured_seconds=0.004)
    metrics = epoch_metrics(
        nothing_left, divide(np.full((1, 7), 0.004)), {}, None, {"time/epoch": 2.0}, size=None, of_mode={}
    )
    times = [name for name in metrics if name.startswith("time/")]
    assert times == ["time/input_wait_fraction", "time/workers", "time/epoch"]
    record = record_of(TrackedRun("", "offline-2"))
    record.write_epoch([EPOCH], {}, ONE_RANK, step=4)
    record.write_epoch([EPOCH, metrics], {}, None, step=8)
    assert [row["epoch"] for row in PhaseTable(checkpoints, 8).add(ONE_RANK, epoch=3, step=12)] == [1, 3]


def test_compiling_is_no_part_of_the_time_of_a_training() -> None:
    # The first step took 30 s, and each of the four others 2 s. A first step that is alone, or faster than the others,
    # has nothing that could be told apart.
    assert [
        EpochResult(0.5, 4.0, 0.1, steps, seconds, first_step_seconds=first).compile_seconds
        for steps, seconds, first in [(4, 8.0, 30.0), (1, 30.0, 0.0), (4, 8.0, 1.5)]
    ] == [28.0, 0.0, 0.0]
    history = [EPOCH]
    for seconds, compiling in ((40.0, 28.0), (12.0, 0.0), (31.0, 21.0)):
        totals = totals_after(
            history, steps=5, global_batch_size=8, payload_bytes=50.0, seconds=seconds, compile_seconds=compiling
        )
        history.append({**EPOCH, **totals})
    names = ("time/elapsed_seconds", "time/compile_seconds", "exchange/payload_bytes_total")
    rows = [tuple(row[name] for name in names) for row in history[1:]]
    assert rows == [(12.0, 28.0, 50.0), (24.0, 28.0, 100.0), (34.0, 49.0, 150.0)]


def test_steps_that_are_taken_again_are_kept_for_the_next_process(run: TrackedRun, record_of: Make) -> None:
    """Another rank dies, and this one before the next checkpoint: nothing else remembers what it wrote meanwhile."""
    memory = os.memfd_create("rows")
    rows = InMemoryRows(memory)
    record = record_of(run, rows=rows)
    for steps in (range(10), range(5, 12)):
        if steps.start:
            record.write_unsaved_steps()
            record.go_on_after(5, [1])
        for step in steps:
            record.write_step(step, 1.0, ExchangeFigures(*[0.5] * 6))
    assert [row.step for row in rows.read()] == list(range(12))
    assert [row[0] for row in record._steps] == [10, 11], "those before are written"
    os.close(memory)
