"""`groundswell grid` as a user meets it: its cells are recorded, and train only in the long test."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from conf.grid import Cell
from conf.load import load
from conf.schema import RunConfig
from jobs import cells, cli, grid, grid_records
from jobs.command import INFRASTRUCTURE, USER_ERROR, exit_code
from jobs.result import Result
from pipelines.comparison.grid_results import CellLine, cells_of, read_lines
from pipelines.dataset.manifest import Manifest
from pipelines.launch.failure import Outcome, WorkerError
from pipelines.packages import MissingPackageError
from pipelines.sample import ImageGroup
from pipelines.tracking.recorded import PARENT_TAG, RecordedRun, recorded_training
from pipelines.tracking.store import TrackingError
from pipelines.training.driver_record import recorded_run
from pipelines.training.identity import training_digest
from tests.patience import patient

COMMAND = Path(sys.executable).parent / "groundswell"
SEEDS = "product: {training.seed: [0, 1, 2]}"
Train = Callable[[RunConfig, Result], None]


def manifest(seed: int = 7) -> Manifest:
    return Manifest(
        archive="eurosat_rgb",
        task="single_label",
        class_names=("water", "land"),
        groups=(ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),),
        splits={},
        statistics={},
        settings={"seed": seed},
        source_fingerprint="abc",
    )


class Trainer:
    """Stands for training: records a run, and ends as each seed is told to."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.ends: dict[int, BaseException] = {}
        self.trained: list[int] = []
        self.resumed: list[str | None] = []

    def __call__(
        self, spark: Any, config: RunConfig, manifest: Manifest, result: Result, tags: Mapping[str, str]
    ) -> None:
        seed = config.training.seed
        self.trained.append(seed)
        self.resumed.append(config.training.resume_run)
        with recorded_run(config, manifest, lambda news, reason: None, tags) as record:
            result.run_id = record.run.run_id
            (record.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            (record.folder / "checkpoints" / "step-00000004.npz").touch()
            values = {"train/loss": 1.0 - 0.1 * seed, "val/top_1": 0.5 + 0.1 * seed, "speed/images_per_second": 8.0}
            points = [Metric(name, value, 1000, 4) for name, value in values.items()]
            MlflowClient(self.store).log_batch(record.run.run_id, metrics=points)
            if seed in self.ends:
                raise self.ends.pop(seed)
        result.metrics = {"val/top_1": 0.5 + 0.1 * seed, "val/loss": float("nan")}


class Spark:
    """Stands for a session whose JVM lives or not."""

    alive = True

    def __getattr__(self, name: str) -> Any:
        if not self.alive:
            raise ConnectionRefusedError
        return self

    def __call__(self, *arguments: Any) -> Any:
        return self

    def isStopped(self) -> bool:  # noqa: N802
        return False

    master = "local[2]"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture
def trainer(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """One store for all tests of this module, an experiment for each."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cells, "check_dataset", lambda config: manifest())
    monkeypatch.setattr(cells, "read_manifest", lambda dataset: manifest())
    trainer = Trainer(store)

    @contextmanager
    def session(name: str, master: str) -> Iterator[Spark]:
        yield Spark()

    monkeypatch.setattr(grid, "spark_session", session)
    monkeypatch.setattr(grid, "check_cluster", lambda spark, workers, gpus: None)
    monkeypatch.setattr(grid, "train_on", trainer)
    monkeypatch.setattr(Spark, "alive", True)
    return trainer


@pytest.fixture
def run(trainer: Trainer, tmp_path: Path) -> Callable[..., int]:
    """Runs a grid in an experiment of its own."""

    def execute(text: str, *more: str) -> int:
        (tmp_path / "grid.yaml").write_text(text)
        command = ["grid", "--config", "smoke", "--grid", "grid.yaml", "--results", "results.jsonl"]
        return cli.execute([*command, "--set", f"tracking.experiment={tmp_path.name}", *more])

    return execute


def lines(folder: Path) -> list[CellLine]:
    return [line for line in read_lines(folder / "results.jsonl") if isinstance(line, CellLine)]


def test_cells_are_trained_once_as_children_of_one_run(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SEEDS) == 0
    output = capsys.readouterr().out
    assert "cell 2: training.seed=1" in output
    assert "no cell is left" in output
    assert "3 cells: 3 finished" in output
    assert trainer.trained == [0, 1, 2]
    first = lines(tmp_path)[0]
    assert (first.settings, first.epochs, first.metrics) == ({"training.seed": 0}, 2, {"val/top_1": 0.5})
    assert first.run is not None
    assert first.run.history["val/top_1"] == [0.5]
    client = MlflowClient(trainer.store)
    parents = {client.get_run(line.run.run_id).data.tags["mlflow.parentRunId"] for line in lines(tmp_path) if line.run}
    (parent,) = parents
    stored = client.get_run(parent)
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "grid")
    assert [item.path for item in client.list_artifacts(parent)] == ["grid.yaml"]
    assert client.get_run(first.run.run_id).info.run_name == "seed=0"
    assert max(map(len, (tmp_path / "results.jsonl").read_text().splitlines())) < 5000, "small enough to be committed"

    # One cell more: it is the only one that is trained, under the same parent.
    assert run("product: {training.seed: [0, 1, 2, 3]}") == 0
    assert trainer.trained == [0, 1, 2, 3]
    last = lines(tmp_path)[-1]
    assert last.run is not None
    assert client.get_run(last.run.run_id).data.tags["mlflow.parentRunId"] == parent
    assert run(SEEDS) == 0
    assert trainer.trained == [0, 1, 2, 3]


def test_a_new_machine_continues_with_the_results_file_alone(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("product: {training.seed: [0]}") == 0
    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    trainer.store = elsewhere
    assert run(SEEDS, "--set", "training.output=other", "--set", "launch.start_timeout_seconds=99") == 0
    assert trainer.trained == [0, 1, 2]
    assert len(read_lines(tmp_path / "results.jsonl")) == 3 + 2, "the new store has a parent of its own"


def test_a_failed_cell_is_recorded_tried_again_and_continued(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.ends = {
        0: WorkerError([Outcome(0, "h", "exception", "FloatingPointError: the loss is nan at step 7", 1)]),
        1: RuntimeError("a host was lost\nwith its log"),
    }
    assert run(SEEDS) == 4
    captured = capsys.readouterr()
    assert [line.status for line in lines(tmp_path)] == ["diverged", "failed", "finished"]
    assert lines(tmp_path)[1].error == "a host was lost"
    assert lines(tmp_path)[0].run is not None
    assert "1 of 3 cells failed, the first with: a host was lost. The same command tries them again" in captured.err
    assert "to continue: groundswell grid --config smoke --grid grid.yaml" in captured.err
    failed = lines(tmp_path)[1].run
    assert failed is not None
    assert run(SEEDS) == 0
    assert trainer.trained == [0, 1, 2, 1], "a diverged cell is a result"
    assert trainer.resumed[-1] == failed.run_id
    last = lines(tmp_path)[-1]
    assert (last.status, last.resumed) == ("finished", True)
    assert cells_of(lines(tmp_path))[last.cell].is_done
    (tmp_path / "results.jsonl").unlink()  # as after a kill before they were written, or in another place
    assert run(SEEDS) == 0
    assert trainer.trained == [0, 1, 2, 1]
    assert [line.status for line in lines(tmp_path)] == ["diverged", "finished", "finished"]
    assert lines(tmp_path)[0].error


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([ValueError("a setting")], 2),
        ([WorkerError([Outcome(0, "h", "exception", "ValueError: my loss", 1)]), ValueError("a setting")], 3),
        ([WorkerError([Outcome(0, "h", "exception", "ValueError: my loss", 1)]), RuntimeError("a host was lost")], 4),
    ],
)
def test_the_exit_code_is_that_of_the_cells(
    errors: list[Exception], code: int, run: Callable[..., int], trainer: Trainer
) -> None:
    trainer.ends = dict(enumerate(errors))
    assert run(SEEDS) == code


def test_an_alias_counts_by_the_version_that_it_means(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    version = 1
    monkeypatch.setattr(cells, "find_model", lambda uri: SimpleNamespace(uri=f"models:/sea/{version}"))
    config = load("smoke", ["warm_start.source=models:/sea@champion"])
    fixed = cells._with_fixed_source(config)
    assert fixed.warm_start.source == "models:/sea/1"
    version = 2
    assert training_digest(cells._with_fixed_source(config), "") != training_digest(fixed, "")
    assert cells._with_fixed_source(fixed) == fixed


def test_ctrl_c_ends_the_grid_and_the_same_command_continues(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.ends = {1: KeyboardInterrupt()}
    assert run(SEEDS, "--result", "result.json") == 130
    assert "to continue: groundswell grid" in capsys.readouterr().err
    result = json.loads((tmp_path / "result.json").read_text())
    assert MlflowClient(trainer.store).get_run(result["run_id"]).info.status == "KILLED"
    assert len(lines(tmp_path)) == 1
    assert run(SEEDS) == 0
    assert trainer.trained == [0, 1, 1, 2]
    assert lines(tmp_path)[1].resumed


def test_a_training_that_finished_and_could_not_be_written_down_is_found(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path
) -> None:
    assert run(SEEDS) == 0
    whole = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(whole[:-40])  # killed while it wrote the last line
    assert run(SEEDS) == 0
    assert trainer.trained == [0, 1, 2]
    assert lines(tmp_path)[-1].run == CellLine.model_validate_json(whole.splitlines()[-1]).run


def test_a_training_that_could_not_be_read_is_added_by_the_next_command(
    run: Callable[..., int],
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = recorded_training
    answers = iter([True, False, True])

    def sometimes(*arguments: Any, **settings: Any) -> RecordedRun:
        if not next(answers):
            raise TrackingError("no answer from MLflow")
        return read(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(grid_records, "recorded_training", sometimes)
        assert run(SEEDS) == 0
    assert "no curves of cell 2: no answer from MLflow; the same command adds them" in capsys.readouterr().out
    before = lines(tmp_path)[1]
    assert before.run is None
    assert cli.execute(["compare", "--results", "results.jsonl"]) == 0
    assert "1 of 3 cells of results.jsonl are not shown" in capsys.readouterr().out
    assert "1 of 3 cells of results.jsonl are not shown" in (tmp_path / "comparison" / "report.html").read_text()
    assert run(SEEDS) == 0
    assert trainer.trained == [0, 1, 2]
    added = lines(tmp_path)[-1]
    assert added.run is not None
    assert added.run.settings["training.seed"] == "1"
    assert added == before.model_copy(update={"run": added.run})
    capsys.readouterr()
    assert cli.execute(["compare", "--results", "results.jsonl"]) == 0
    assert "not shown" not in capsys.readouterr().out


def test_a_training_that_is_found_has_the_metrics_of_its_model(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path
) -> None:
    text = "{set: {training.selection: {metric: val/top_1, model: best}}, product: {training.seed: [0]}}"
    assert run(text) == 0
    (line,) = lines(tmp_path)
    assert line.run is not None
    client, run_id = MlflowClient(trainer.store), line.run.run_id
    later = {"train/loss": 0.2, "val/top_1": 0.4, "val/loss": 0.7}
    client.log_batch(run_id, metrics=[Metric(name, value, 2000, 8) for name, value in later.items()])
    client.set_tag(run_id, "best_epoch", "1")
    (tmp_path / "results.jsonl").unlink()
    assert run(text) == 0
    (found,) = lines(tmp_path)
    assert trainer.trained == [0]
    assert found.metrics == {"train/loss": 1.0, "val/top_1": 0.5, "speed/images_per_second": 8.0}
    last = "product: {training.seed: [0]}"
    assert run(last) == 0
    client.log_batch(lines(tmp_path)[-1].run.run_id, metrics=[Metric("train/loss", 0.2, 2000, 8)])  # type: ignore[union-attr]
    (tmp_path / "results.jsonl").unlink()
    assert run(last) == 0
    assert lines(tmp_path)[-1].metrics == {"train/loss": 0.2}


def rename_experiment(trainer: Trainer, old: str, new: str) -> None:
    client = MlflowClient(trainer.store)
    client.rename_experiment(client.get_experiment_by_name(old).experiment_id, new)


def test_a_renamed_experiment_is_named_before_spark_starts_and_its_cells_continue(
    run: Callable[..., int],
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer.ends = {1: KeyboardInterrupt()}
    assert run(SEEDS) == 130
    old, new = tmp_path.name, f"{tmp_path.name}-2026"
    rename_experiment(trainer, old, new)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(grid, "spark_session", None)
        assert run(SEEDS) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"was begun in experiment '{old}', which is '{new}' now: set tracking.experiment={new}" in line
    client = MlflowClient(trainer.store)
    assert client.get_experiment_by_name(old) is None
    before = read_lines(tmp_path / "results.jsonl")
    assert run(SEEDS, "--set", f"tracking.experiment={new}") == 0
    assert trainer.trained == [0, 1, 1, 2]
    assert trainer.resumed[2] is not None
    added = read_lines(tmp_path / "results.jsonl")[len(before) :]
    assert [line.kind for line in added] == ["cell", "cell"], "the parent is the same"
    runs = client.search_runs([client.get_experiment_by_name(new).experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 4


def test_curves_are_not_looked_for_in_another_experiment_than_the_renamed_one(
    run: Callable[..., int],
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def away(*arguments: Any, **settings: Any) -> RecordedRun:
        raise TrackingError("no answer from MLflow")

    with monkeypatch.context() as patch:
        patch.setattr(grid_records, "recorded_training", away)
        assert run(SEEDS) == 0
    rename_experiment(trainer, tmp_path.name, f"{tmp_path.name}-2026")
    assert run(SEEDS) == 2
    assert f"set tracking.experiment={tmp_path.name}-2026" in capsys.readouterr().err
    assert run(SEEDS, "--set", f"tracking.experiment={tmp_path.name}-2026") == 0
    assert all(line.run is not None for line in cells_of(lines(tmp_path)).values())


@pytest.mark.parametrize("change", ["rewritten", "removed"])
def test_the_grid_file_that_was_planned_is_kept_from_the_first_cell_on(
    change: str,
    run: Callable[..., int],
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    artifact_text: Callable[[str, str, str], str],
) -> None:
    kept: list[str] = []

    def train(spark: Any, config: RunConfig, manifest: Manifest, result: Result, tags: Mapping[str, str]) -> None:
        kept.append(artifact_text(trainer.store, tags[PARENT_TAG], "grid.yaml"))
        if change == "rewritten":
            (tmp_path / "grid.yaml").write_text("product: {training.seed: [7]}")
        else:
            (tmp_path / "grid.yaml").unlink(missing_ok=True)
        trainer(spark, config, manifest, result, tags)

    monkeypatch.setattr(grid, "train_on", train)
    assert run(SEEDS) == 0
    (first,) = (line for line in read_lines(tmp_path / "results.jsonl") if line.kind == "grid")
    assert [*kept, artifact_text(trainer.store, first.parent, "grid.yaml")] == [SEEDS] * 4


def test_an_experiment_that_is_renamed_meanwhile_ends_the_grid(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*arguments: Any) -> None:
        trainer(*arguments)
        if trainer.trained == [0]:
            rename_experiment(trainer, tmp_path.name, f"{tmp_path.name}-2026")

    monkeypatch.setattr(grid, "train_on", train)
    assert run(SEEDS) == 2
    assert run(SEEDS, "--set", f"tracking.experiment={tmp_path.name}-2026") == 0
    assert trainer.trained == [0, 1, 2]
    assert MlflowClient(trainer.store).get_experiment_by_name(tmp_path.name) is None


def test_a_deleted_run_of_the_grid_is_replaced_by_a_new_one(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path
) -> None:
    assert run("product: {training.seed: [0]}") == 0
    (first,) = (line for line in read_lines(tmp_path / "results.jsonl") if line.kind == "grid")
    MlflowClient(trainer.store).delete_run(first.parent)
    assert run(SEEDS) == 0
    assert [line.kind for line in read_lines(tmp_path / "results.jsonl")] == ["grid", "cell", "grid", "cell", "cell"]


def test_a_dataset_that_is_replaced_meanwhile_ends_the_grid(
    run: Callable[..., int],
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("check_dataset", "read_manifest"):
        monkeypatch.setattr(cells, name, lambda _: manifest(8 if trainer.trained else 7))
    assert run(SEEDS) == 2
    assert "cell 2: the dataset " in capsys.readouterr().err
    assert trainer.trained == [0]
    assert run(SEEDS) == 0
    assert trainer.trained == [0, 0, 1, 2]
    assert len({line.cell for line in lines(tmp_path)}) == 4


def test_a_dead_jvm_ends_the_grid_and_blames_no_cell(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def dying(*arguments: Any) -> None:
        monkeypatch.setattr(Spark, "alive", False)
        raise RuntimeError("no answer")

    monkeypatch.setattr(grid, "train_on", dying)
    assert run(SEEDS) == 4
    assert "Spark's JVM died in cell 1" in capsys.readouterr().err
    assert lines(tmp_path) == []


def test_a_dry_run_shows_cells_and_an_estimate_and_changes_nothing(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SEEDS, "--dry-run") == 0
    output = capsys.readouterr().out.splitlines()
    assert output[1].split() == ["1", "open", "-", "training.seed=0"]
    assert output[-1] == "3 of 3 cells to train, no estimate: no cell is finished yet"
    assert not (tmp_path / "results.jsonl").exists()
    line = CellLine(
        cell=training_digest(load("smoke", [f"tracking.experiment={tmp_path.name}"]), manifest().fingerprint),
        status="finished",
        settings={"training.seed": 0},
        seconds=30.0,
        epochs=2,
    )
    (tmp_path / "results.jsonl").write_text(line.model_dump_json() + "\n")
    assert run(SEEDS, "--dry-run", "--set", "training.output=elsewhere") == 0
    output = capsys.readouterr().out.splitlines()
    assert output[1].split() == ["1", "finished", "30", "s", "training.seed=0"]
    assert output[2].split() == ["2", "open", "~30", "s", "training.seed=1"]
    assert output[-1] == "2 of 3 cells to train, about 60 s by the finished ones"
    assert trainer.trained == []
    resumed = line.model_copy(update={"resumed": True})
    (tmp_path / "results.jsonl").write_text(resumed.model_dump_json() + "\n")
    assert run(SEEDS, "--dry-run") == 0
    output = capsys.readouterr().out.splitlines()
    assert output[1].split() == ["1", "finished", ">30", "s", "training.seed=0"], "its time before is not known"


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (SEEDS, ("--set", "training.seed=1"), "--set training.seed has no effect: every cell of grid.yaml sets it"),
        (
            "product: {optimizer: [{name: sgd, momentum: 0.5}, sgd]}",
            ("--set", "optimizer.momentum=0.1"),
            "--set optimizer.momentum: cell 1 (optimizer={name: sgd, momentum: 0.5}) sets it too, within optimizer",
        ),
        (SEEDS, ("--set", "training.resume_run=x"), "--set training.resume_run has no effect: grid does not read it"),
        ("product: {training.sed: [1]}", (), "cell 1 (training.sed=1): training.sed: unknown key (did you"),
        ("product: {training.epochs: [1, 0]}", (), "cell 2 (training.epochs=0): config smoke: "),
        (
            "product: {archive.kind: [eurosat_rgb]}",
            (),
            "cell 1 (archive=eurosat_rgb): ",
        ),
        (
            "product: {optimizer: [lars, adamw]}",
            ("--set", "optimizer.name=sgd"),
            "--set optimizer has no effect: every cell of grid.yaml sets it",
        ),
        (
            "product: {optimizer.name: [lars, adamw]}",
            ("--set", "optimizer=sgd"),
            "--set optimizer has no effect: every cell of grid.yaml sets it",
        ),
        ("cells: [{optimizer: adamm}]", (), "cell 1 (optimizer=adamm): "),
        ("set: {tracking.offline: true}", (), "cell 1 (tracking.offline=true): tracking.offline=true: a grid finds"),
        ("cells: 3", (), "grid grid.yaml: cells should be a list"),
    ],
)
def test_a_mistake_in_any_cell_is_one_line_before_the_first_starts(
    run: Callable[..., int], trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    text: str, more: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    assert run(text, *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert trainer.trained == []
    assert not (tmp_path / "results.jsonl").exists()


def test_a_cell_that_is_there_twice_is_trained_once(run: Callable[..., int], trainer: Trainer) -> None:
    assert run("[{product: {training.seed: [0, 1]}}, {cells: [{training.seed: 1, training.epochs: 2}]}]") == 0
    assert trainer.trained == [0, 1]


def test_cells_that_differ_in_nothing_that_counts_are_a_mistake(
    run: Callable[..., int], trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("product: {launch.threads_per_worker: [1, 2]}") == 2
    expected = (
        "cells 1 (launch.threads_per_worker=1) and 2 (launch.threads_per_worker=2) of grid.yaml are one training: what "
        "they differ in has no influence on its result"
    )
    assert expected in capsys.readouterr().err
    assert trainer.trained == []


def test_a_file_of_weights_counts_by_its_content(tmp_path: Path) -> None:
    def digest(name: str) -> str:
        return training_digest(load("smoke", [f"warm_start.source={tmp_path / name}"]), manifest().fingerprint)

    for name, content in (("a.npz", b"1"), ("b.npz", b"1"), ("c.npz", b"2")):
        (tmp_path / name).write_bytes(content)
    assert digest("a.npz") == digest("b.npz") != digest("c.npz")
    with pytest.raises(FileNotFoundError, match=r"warm_start\.source=.*/d\.npz does not exist"):
        digest("d.npz")


def test_a_cells_run_is_named_by_what_the_grid_sets() -> None:
    values = {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "exchange.codec": "fp16", "training.seed": 1}
    config = load("smoke")
    named = cells.PlannedCell(Cell(1, values), config, manifest(), "digest")
    assert named.name == "sgd learning_rate=0.1 fp16 seed=1"
    assert named.cell.text == "optimizer={name: sgd, learning_rate: 0.1}, exchange.codec=fp16, training.seed=1"


def test_the_digest_is_of_what_decides_the_result() -> None:
    def digest(*settings: str, seed: int = 7) -> str:
        return training_digest(load("smoke", list(settings)), manifest(seed).fingerprint)

    same = ("training.output=x", "tracking.run_name=x", "launch.master=local[9]", "reader.verify=never")
    same += ("dataset.path=elsewhere", "training.checkpoint_every_steps=3", "training.mixup=null")
    assert {digest(setting) for setting in same} == {digest()}
    others = ("training.seed=1", "optimizer=sgd", "optimizer=lamb", "launch.num_workers=4", "exchange.codec=fp16")
    others += ("exchange.codec=powersgd", "exchange.codec={name: powersgd, rank: 3}", "schedule.warmup=none")
    others += ("reader.name=petastorm", "reader.cache_limit_gib=1")
    others += ("schedule.decay=cosine", "training.precision=bfloat16", "input.augmentation=flips")
    assert len({digest(), digest(seed=8), *(digest(setting) for setting in others)}) == 2 + len(others)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.timeout(900)
def test_a_real_grid_is_killed_and_continued(
    small_dataset: Path, small_network: str, tmp_path: Path, mlflow_store: str
) -> None:
    (tmp_path / "grid.yaml").write_text("product: {training.seed: [0, 1]}")
    command = [COMMAND, "grid", "--config", "smoke", "--grid", "grid.yaml", "--results", "results.jsonl"]
    command += ["--set", f"dataset.path={small_dataset}", "--set", "training.output=out", "--set", small_network]
    results = tmp_path / "results.jsonl"
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + patient(400)
        # In its second cell, after that cell's first checkpoint.
        while not (results.exists() and lines(tmp_path) and len(list(tmp_path.glob("out/*/checkpoints/*04.npz"))) > 1):
            assert driver.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    (first,) = lines(tmp_path)
    results.write_bytes(results.read_bytes() + b'{"format_version":1,"kind":"cell","ce')
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(400))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 cells to train" in done.stdout
    assert "2 cells: 2 finished" in done.stdout
    kept, second = lines(tmp_path)
    assert kept == first
    assert (second.status, second.resumed, second.settings) == ("finished", True, {"training.seed": 1})
    assert second.run is not None
    assert second.run.history["epoch"] == [1, 2]
    assert second.metrics["val/f1_micro"] >= 0
    parents = [line for line in read_lines(results) if not isinstance(line, CellLine)]
    (parent,) = parents
    assert MlflowClient(mlflow_store).get_run(parent.parent).info.status == "FINISHED"
    compared = [COMMAND, "compare", "--results", "results.jsonl"]
    done = subprocess.run(compared, cwd=tmp_path, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == 0, done.stderr
    assert "±" in (tmp_path / "comparison" / "report.html").read_text(), "two seeds have a deviation"


def test_a_store_that_does_not_answer_is_told_before_spark_starts(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(grid, "spark_session", None)
    assert run(SEEDS) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "no answer from MLflow, see MLFLOW_TRACKING_URI: API request to" in line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MissingPackageError("reader.name=petastorm needs petastorm"), USER_ERROR),
        (PermissionError(13, "Permission denied", "/data/bigearthnet"), USER_ERROR),
        (OSError(5, "Input/output error", "/data/bigearthnet"), INFRASTRUCTURE),
        (RuntimeError("no answer from MLflow"), INFRASTRUCTURE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_error_of_a_cell_names_it_and_keeps_its_exit_code(error: Exception, code: int) -> None:
    """A scheduler that tries again what may mend itself does not try a user's mistake again."""
    named = cells.named(error, Cell(2, {"training.seed": 1}))
    assert exit_code(named) == code
    assert str(named) == f"cell 2 (training.seed=1): {error}"


def test_a_dataset_that_may_not_be_read_is_told_with_its_cell(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(config: RunConfig) -> Manifest:  # the administrator, who may run this, can read everything
        raise PermissionError(13, "Permission denied", config.dataset.path)

    monkeypatch.setattr(cells, "check_dataset", denied)
    assert run("product: {training.seed: [0, 1]}", "--set", "dataset.path=/data/bigearthnet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cell 1 (training.seed=0): [Errno 13] Permission denied: '/data/bigearthnet'" in line
