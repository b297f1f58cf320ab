"""What rank 0 writes while it trains, in a real store."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from conf.load import load
from models.compression.exchange.exchange import METRICS
from pipelines.remote_path import RemotePath
from pipelines.tracking import runs
from pipelines.tracking.store import TrackedRun
from pipelines.training.epoch_metrics import epoch_metrics, totals_after
from pipelines.training.kept_state import KeptRows
from pipelines.training.loop import EpochResult
from pipelines.training.phase_table import FILE_NAME, PhaseTable
from pipelines.training.phases import divide
from pipelines.training.record import Record

TWO_RANKS = divide(np.array([[1.0, 0.1, 0.0, 0.2, 0.0, 0.1, 0.3], [1.0, 0.1, 0.0, 0.1, 0.0, 0.1, 0.2]]))
ONE_RANK = divide(np.array([[2.0, 0.1, 0.0, 0.0, 0.0, 0.1, 0.1]]))
EPOCH = {"train/loss": 0.5, "time/step_seconds": 1.0}
EPOCH |= {f"time/step_{name}_seconds": seconds for name, seconds in TWO_RANKS.mean.items()}


def test_a_resumed_training_keeps_where_the_steps_of_earlier_epochs_went(
    module_mlflow_store: str, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    run = runs.start_run("record", None, {}, {})
    checkpoints = tmp_path / "checkpoints"

    def record(start_step: int) -> Record:
        return Record(run, checkpoints, lambda step: 0.1, start_step=start_step)

    def end(record: Record, step: int) -> None:
        record.hold(step)
        assert record.write_end({}, {}, steps=step) == ("", "")

    first = record(0)
    first.write_epoch([EPOCH], {}, TWO_RANKS, step=4)
    first.hold(4)
    # It dies before the checkpoint of its second epoch, which the next process repeats, on one rank.
    first.write_epoch([EPOCH, EPOCH], {}, TWO_RANKS, step=8)
    second = record(4)
    second.write_epoch([EPOCH, EPOCH], {}, ONE_RANK, step=8)
    second.hold(8)
    second.write_epoch([EPOCH] * 3, {}, TWO_RANKS, step=12)
    end(second, 12)
    table = json.loads(artifact_text(module_mlflow_store, run.run_id, "where_the_step_goes.json"))
    assert [row[:2] for row in table["data"]] == [[1, 0], [1, 1], [2, 0], [3, 0], [3, 1]]
    compute = table["columns"].index("compute_seconds")
    assert [row[compute] for row in table["data"]] == pytest.approx([0.6, 0.7, 1.8, 0.6, 0.7])
    # A process that trains no epoch draws what the one before may have left out.
    last = record(12)
    last.draw_again([EPOCH] * 3, {}, step=12)
    end(last, 12)
    names = {item.path for item in MlflowClient(module_mlflow_store).list_artifacts(run.run_id)}
    assert {"learning_curves.png", "where_the_step_goes.png"} <= names
    # A run that an earlier version began has no rows of its first epochs, and the right numbers from then on.
    (checkpoints / FILE_NAME).unlink()
    assert [row["epoch"] for row in PhaseTable(checkpoints, 12).add(ONE_RANK, epoch=4, step=16)] == [4]


def test_epochs_whose_journal_is_lost_are_written_from_the_checkpoint(module_mlflow_store: str, tmp_path: Path) -> None:
    run, checkpoints = runs.start_run("lost journal", None, {}, {}), tmp_path / "checkpoints"
    history = [{**EPOCH, "train/loss": loss, "val/f1_micro": 1 - loss} for loss in (0.5, 0.4, 0.3, 0.2)]
    client = MlflowClient(module_mlflow_store)

    def record(start_step: int, store: str = module_mlflow_store) -> Record:
        return Record(TrackedRun(store, run.run_id), checkpoints, lambda step: 0.1, start_step=start_step)

    first = record(0)
    first.write_epoch(history[:1], {}, TWO_RANKS, step=4)
    first.hold(4)
    assert first.write_end({}, {}, steps=4) == ("", "")
    # Without the store the second epoch is in the journal only, which is lost; the third is in the journal that stays.
    away = record(4, store="")
    away.write_epoch(history[:2], {}, TWO_RANKS, step=8)
    away.hold(8)
    away.write_end({}, {}, steps=8)
    shutil.rmtree(tmp_path / "journal")
    again = record(8, store="")
    again.write_epoch(history[:3], {}, TWO_RANKS, step=12)
    again.hold(12)
    again.write_end({}, {}, steps=12)
    summary = {"summary/parameters": 7.0, "summary/best_value": 0.7}
    target = {"summary/epochs_to_target": 2.0}
    for further in ({}, {}, target):
        resumed = record(12)
        resumed.write_absent([{**row, "of_an_earlier_version": 1.0} for row in history[:3]], steps=4)
        # As where the model was not logged: a run that is finished again has its summary once, and what is new in it.
        assert resumed.write_end({}, summary | further, steps=12) == ("", "")
    last = record(12)
    last.write_absent(history[:3], steps=4)
    last.write_epoch(history, {}, TWO_RANKS, step=16)
    last.hold(16)
    assert last.write_end({}, {}, steps=16) == ("", "")
    for name, expected in {
        "train/loss": [0.5, 0.4, 0.3, 0.2],
        "epoch/train_loss": [0.5, 0.4, 0.3, 0.2],
        "val/f1_micro": [0.5, 0.6, 0.7, 0.8],
        "time/step_seconds": [1.0] * 4,
    }.items():
        points = client.get_metric_history(run.run_id, name)
        found = sorted((point.step, point.value) for point in points)
        assert found == [(4 * number, value) for number, value in enumerate(expected, 1)], name
    for name, value in (summary | target).items():
        assert [(point.step, point.value) for point in client.get_metric_history(run.run_id, name)] == [(12, value)]
    assert "of_an_earlier_version" not in client.get_run(run.run_id).data.metrics


def test_curves_by_step_have_no_times_of_the_step_that_compiles(module_mlflow_store: str, tmp_path: Path) -> None:
    run = runs.start_run("curves", None, {}, {})
    for start in (0, 3):
        record = Record(run, tmp_path / "checkpoints", lambda step: 0.1, start_step=start)
        for step in range(start, start + 3):
            measured = np.arange(6.0)
            record.write_step(step, 0.5, measured)
            assert measured.tolist() == [0, 1, 2, 3, 4, 5], "the epoch's sums are made of the same array"
        record.write_steps(start + 3)
        record.hold(start + 3)
        assert record.write_end({}, {}, steps=start + 3) == ("", "")
    client = MlflowClient(module_mlflow_store)

    def curve(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in client.get_metric_history(run.run_id, name)]

    for name, value in {"time/encode_seconds": 3, "time/collective_seconds": 4, "time/decode_seconds": 5}.items():
        assert curve(name) == [(step, value) for step in (1, 2, 4, 5)], name
    for name, value in {"exchange/payload_bytes": 0, "exchange/residual_norm": 2, "train/step_loss": 0.5}.items():
        assert curve(name) == [(step, value) for step in range(6)], name


def test_a_table_that_cannot_be_read_is_begun_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_text("[{")
    rows = PhaseTable(tmp_path, 4).add(ONE_RANK, epoch=2, step=8)
    assert [row["epoch"] for row in rows] == [2]
    assert f"{FILE_NAME} cannot be read" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_run_without_a_store_needs_none(tmp_path: Path) -> None:
    record = Record(TrackedRun("", "offline-1"), tmp_path / "checkpoints", lambda step: 0.1, start_step=0)
    record.write_epoch([EPOCH], {}, TWO_RANKS, step=4)
    record.hold(4)
    assert record.write_end({}, {}, steps=4) == ("", "tracking.offline=true")


def test_behind_a_url_the_records_of_an_epoch_are_there_before_its_checkpoint(s3_folder: str) -> None:
    place, run = RemotePath(s3_folder) / "run", TrackedRun("", "offline-1")
    record = Record(run, place / "checkpoints", lambda step: 0.1, start_step=0)
    record.write_epoch([EPOCH], {}, TWO_RANKS, step=4)
    # Its machine is lost between the checkpoint and the next call.
    assert set(place.folder.files()) >= {"checkpoints/phases.json", "journal/rank-0/entries.jsonl"}
    again = Record(run, place / "checkpoints", lambda step: 0.1, start_step=4)
    again.write_epoch([EPOCH, EPOCH], {}, ONE_RANK, step=8)
    again.hold(8)
    assert again.write_end({}, {}, steps=8) == ("", "tracking.offline=true")
    lines = [json.loads(line) for line in place.folder.read("journal/rank-0/entries.jsonl").splitlines()]
    points = [point for line in lines for point in line.get("content", {}).get("points", [])]
    assert [step for name, step, *_ in points if name == "train/loss"] == [4, 8]
    (table,) = (line for line in lines if line.get("path") == "where_the_step_goes.json" and line["after_step"] == 8)
    rows = json.loads(place.folder.read(f"journal/rank-0/files/{table['content']['file']}"))["data"]
    assert [row[:2] for row in rows] == [[1, 0], [1, 1], [2, 0]]


def test_a_step_that_compiles_has_no_times(module_mlflow_store: str, tmp_path: Path) -> None:
    run = runs.start_run("compiling", None, {}, {})
    record = Record(run, tmp_path / "checkpoints", lambda step: 0.1, start_step=0)
    measured = np.ones(len(METRICS))
    for step in range(4):
        if step == 2:
            record.expect_compiling()
        record.write_step(step, 0.5, measured)
    record.write_steps(4)
    record.hold(4)
    assert record.write_end({}, {}, steps=4) == ("", "")
    client = MlflowClient(module_mlflow_store)
    for name, steps in (("train/step_loss", [0, 1, 2, 3]), ("time/collective_seconds", [1, 3])):
        assert [point.step for point in client.get_metric_history(run.run_id, name)] == steps


def test_an_epoch_without_steps_has_no_times_of_a_step(tmp_path: Path) -> None:
    nothing_left = EpochResult(0.5, 0.0, 0.0, measured_steps=0, measured_seconds=0.004)
    metrics = epoch_metrics(nothing_left, divide(np.full((1, 7), 0.004)), {}, None, {"time/epoch": 2.0})
    assert [name for name in metrics if name.startswith("time/")] == [
        "time/input_wait_fraction", "time/workers", "time/epoch",
    ]  # fmt: skip
    record = Record(TrackedRun("", "offline-2"), tmp_path / "checkpoints", lambda step: 0.1, start_step=0)
    record.write_epoch([EPOCH], {}, ONE_RANK, step=4)
    record.write_epoch([EPOCH, metrics], {}, None, step=8)
    assert [row["epoch"] for row in PhaseTable(tmp_path / "checkpoints", 8).add(ONE_RANK, epoch=3, step=12)] == [1, 3]


def test_compiling_is_no_part_of_the_time_of_a_training() -> None:
    # The first step took 30 s, and each of the four others 2 s.
    first = EpochResult(0.5, 4.0, 0.1, measured_steps=4, measured_seconds=8.0, first_step_seconds=30.0)
    assert first.compile_seconds == 28.0
    config, history = load("smoke"), [EPOCH]
    for seconds, compiling in ((40.0, first.compile_seconds), (12.0, 0.0), (31.0, 21.0)):
        totals = totals_after(history, config, steps=5, payload_bytes=50.0, seconds=seconds, compile_seconds=compiling)
        history.append({**EPOCH, **totals})
    assert [row["time/elapsed_seconds"] for row in history[1:]] == [12.0, 24.0, 34.0]
    assert [row["time/compile_seconds"] for row in history[1:]] == [28.0, 28.0, 49.0]
    assert [row["exchange/payload_bytes_total"] for row in history[1:]] == [50.0, 100.0, 150.0]
    # A first step that is alone, or faster than the others, has nothing that could be told apart.
    assert EpochResult(0.5, 4.0, 0.1, measured_steps=1, measured_seconds=30.0).compile_seconds == 0.0
    assert EpochResult(0.5, 4.0, 0.1, 4, 8.0, first_step_seconds=1.5).compile_seconds == 0.0


def test_steps_that_are_taken_again_are_kept_for_the_next_process(module_mlflow_store: str, tmp_path: Path) -> None:
    """Another rank dies, and this one before the next checkpoint: nothing else remembers what it wrote meanwhile."""
    run = runs.start_run("record", None, {}, {})
    memory = os.memfd_create("rows")
    rows = KeptRows(memory)
    measured = np.full(len(METRICS), 0.5)
    record = Record(run, tmp_path / "checkpoints", lambda step: 0.1, start_step=0, rows=rows)
    for step in range(10):
        record.write_step(step, 1.0, measured)
    record.write_unsaved_steps()
    record.go_on_after(5, [1])
    for step in range(5, 12):
        record.write_step(step, 1.0, measured)
    assert [row[0] for row in rows.read()] == list(range(12))
    assert [row[0] for row in record._steps] == [10, 11], "those before are written"
    os.close(memory)
