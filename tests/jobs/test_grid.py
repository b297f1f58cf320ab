"""`groundswell grid` as a user meets it: its cells are recorded, and train only in the long test."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from conf.grid import Cell
from conf.load import load
from conf.schema import RunConfig
from jobs import grid
from jobs.grids import cells
from jobs.shell import cli
from jobs.shell.command import INFRASTRUCTURE, USER_ERROR, Result, exit_code
from pipelines.comparison.grid_results import CellLine, GridLine, cells_of, read_lines
from pipelines.dataset.format.manifest import Manifest
from pipelines.launch.driver.failure import Outcome, WorkerError
from pipelines.machine.packages import MissingPackageError
from pipelines.tracking.journal.sync import DRIVER_DIED
from pipelines.tracking.store import runs
from pipelines.tracking.store.recorded import PARENT_TAG, RecordedRun, recorded_training
from pipelines.tracking.store.store import TrackedRun, TrackingError
from pipelines.training.driver.identity import training_digest
from pipelines.training.driver.run import recorded_run
from tests.patience import patient, wait_until

COMMAND, SEEDS = Path(sys.executable).parent / "groundswell", "product: {training.seed: [0, 1, 2]}"
Run = Callable[..., str]


class Trainer:
    """Stands for training: records a run, and ends as each seed is told to."""

    def __init__(self, store: str, experiment: str) -> None:
        self.store, self.experiment = store, experiment
        self.ends: dict[int, BaseException] = {}
        self.trained: list[int] = []
        self.resumed: list[str | None] = []

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.store)

    def rename_experiment(self) -> str:
        """Give the experiment another name, which is returned."""
        experiment = self.client.get_experiment_by_name(self.experiment)
        self.client.rename_experiment(experiment.experiment_id, f"{self.experiment}-2026")
        return f"{self.experiment}-2026"

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
            self.log(result.run_id, values)
            if seed in self.ends:
                raise self.ends.pop(seed)
        result.metrics = {"val/top_1": 0.5 + 0.1 * seed, "val/loss": float("nan")}

    def log(self, run_id: str, values: dict[str, float], step: int = 4) -> None:
        points = [Metric(name, value, 1000 * step, step) for name, value in values.items()]
        self.client.log_batch(run_id, metrics=points)


class Spark:
    """Stands for a session whose JVM lives or not."""

    alive, master = True, "local[2]"

    def __getattr__(self, name: str) -> Any:
        if not self.alive:
            raise ConnectionRefusedError
        return self

    def __call__(self, *arguments: Any) -> Any:
        return self

    def isStopped(self) -> bool:  # noqa: N802
        return False


@pytest.fixture
def trainer(
    module_mlflow_store: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    eurosat_manifest: Callable[..., Manifest],
) -> Trainer:
    """One store for all tests of this module, an experiment for each."""
    for name in ("check_dataset", "read_manifest"):
        monkeypatch.setattr(cells, name, lambda place: eurosat_manifest())
    trainer = Trainer(module_mlflow_store, folder.name)
    monkeypatch.setattr(grid, "spark_session", lambda *_, **__: nullcontext(Spark()))
    for name in ("check_cluster", "check_run"):  # the trainer's checkpoints are empty
        monkeypatch.setattr(grid, name, lambda *_: None)
    monkeypatch.setattr(grid, "train_on", trainer)
    monkeypatch.setattr(Spark, "alive", True)
    return trainer


@pytest.fixture
def run(trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a grid in an experiment of its own, which must end with a code: what it prints to both streams."""

    def execute(text: str, *more: str, code: int = 0) -> str:
        (tmp_path / "grid.yaml").write_text(text)
        command = ["grid", "--config", "smoke", "--grid", "grid.yaml", "--results", "results.jsonl"]
        capsys.readouterr()
        assert cli.execute([*command, "--set", f"tracking.experiment={tmp_path.name}", *more]) == code
        return "".join(capsys.readouterr())

    return execute


def lines(folder: Path) -> list[CellLine]:
    return [line for line in read_lines(folder / "results.jsonl") if isinstance(line, CellLine)]


def grids(folder: Path) -> list[GridLine]:
    return [line for line in read_lines(folder / "results.jsonl") if isinstance(line, GridLine)]


def away(*arguments: Any, **settings: Any) -> RecordedRun:
    raise TrackingError("no answer from MLflow")


def test_cells_are_trained_once_as_children_of_one_run(
    run: Run, trainer: Trainer, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    assert re.search(r"cell 2: training.seed=1[\s\S]*no cell is left[\s\S]*3 cells: 3 finished", run(SEEDS))
    first, *others = lines(tmp_path)
    assert (first.settings, first.epochs, first.metrics, first.run.history["val/top_1"]) == (
        {"training.seed": 0},
        2,
        {"val/top_1": 0.5},
        [0.5],
    )

    def parent_of(line: CellLine) -> str:
        return trainer.client.get_run(line.run.run_id).data.tags["mlflow.parentRunId"]

    (parent,) = {parent_of(line) for line in (first, *others)}
    stored = trainer.client.get_run(parent)
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "grid")
    files = {item.path for item in trainer.client.list_artifacts(parent)}
    assert files == {"grid.yaml", "leaderboard.csv", "compare.html"}
    rows = [*csv.DictReader(io.StringIO(artifact_text(trainer.store, parent, "leaderboard.csv")))]
    expected = [
        ("1", "3", "2", "0.7", "finished"),
        ("2", "2", "1", "0.6", "finished"),
        ("3", "1", "0", "0.5", "finished"),
    ]
    columns = ("place", "cell", "training.seed", "val/top_1 best", "ended")
    assert [tuple(row[column] for column in columns) for row in rows] == expected
    best = {"best_run": others[1].run.run_id, "best.training.seed": "2"}
    assert (stored.data.metrics, stored.data.tags) == ({"val/top_1": 0.7}, stored.data.tags | best)
    assert "Comparison of grid grid" in artifact_text(trainer.store, parent, "compare.html")
    assert trainer.client.get_run(first.run.run_id).info.run_name == f"seed=0 {first.cell[:6]}"
    assert max(map(len, (tmp_path / "results.jsonl").read_text().splitlines())) < 5000, "small enough to be committed"

    # One cell more: it is the only one that is trained, under the same parent, whose driver had been killed.
    runs.set_tags(TrackedRun(trainer.store, parent), DRIVER_DIED)
    run("product: {training.seed: [0, 1, 2, 3]}")
    assert parent_of(lines(tmp_path)[-1]) == parent
    stored = trainer.client.get_run(parent)
    assert (stored.data.tags["driver"], stored.data.tags["best.training.seed"]) == ("", "3")
    run(SEEDS)
    assert trainer.trained == [0, 1, 2, 3]


def test_a_new_machine_continues_with_the_results_file_alone(
    run: Run, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("product: {training.seed: [0]}")
    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    trainer.store = elsewhere
    run(SEEDS, "--set", "training.output=other", "--set", "launch.start_timeout_seconds=99")
    assert trainer.trained == [0, 1, 2]
    assert len(read_lines(tmp_path / "results.jsonl")) == 3 + 2, "the new store has a parent of its own"


def broken(text: str) -> WorkerError:
    return WorkerError([Outcome(0, "h", "exception", text, 1)])


def test_a_failed_cell_is_recorded_tried_again_and_continued(run: Run, trainer: Trainer, tmp_path: Path) -> None:
    trainer.ends = {
        0: broken("FloatingPointError: the loss is nan at step 7"),
        1: RuntimeError("a host was lost\nwith its log"),
    }
    told = run(SEEDS, code=4)
    diverged, failed, finished = lines(tmp_path)
    assert ([line.status for line in (diverged, failed, finished)], diverged.run is None, failed.error) == (
        ["diverged", "failed", "finished"],
        False,
        "a host was lost",
    )
    assert "1 of 3 cells failed, the first with: a host was lost. The same command tries them again" in told
    assert "to continue: groundswell grid --config smoke --grid grid.yaml" in told
    run(SEEDS)
    last = lines(tmp_path)[-1]
    assert (trainer.resumed[-1], last.status, last.resumed) == (failed.run.run_id, "finished", True)
    assert cells_of(lines(tmp_path))[last.cell].is_done
    (tmp_path / "results.jsonl").unlink()  # as after a kill before they were written, or in another place
    run(SEEDS)
    assert trainer.trained == [0, 1, 2, 1], "a diverged cell is a result"
    assert [line.status for line in lines(tmp_path)] == ["diverged", "finished", "finished"]
    assert lines(tmp_path)[0].error


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([ValueError("a setting")], 2),
        ([broken("ValueError: my loss"), ValueError("a setting")], 3),
        ([broken("ValueError: my loss"), RuntimeError("a host was lost")], 4),
    ],
)
def test_the_exit_code_is_that_of_the_cells(errors: list[Exception], code: int, run: Run, trainer: Trainer) -> None:
    trainer.ends = dict(enumerate(errors))
    run(SEEDS, code=code)


def test_an_alias_counts_by_the_version_that_it_means(monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = load("smoke", ["warm_start.source=models:/sea@champion"]), []
    for served in (SimpleNamespace(uri="models:/sea/1"), SimpleNamespace(uri="models:/sea/2")):
        monkeypatch.setattr(cells, "find_model", lambda uri, served=served: served)
        found.append(cells.with_fixed_source(config))
    assert [each.warm_start.source for each in found] == ["models:/sea/1", "models:/sea/2"]
    assert (len({training_digest(each, "") for each in found}), cells.with_fixed_source(found[0])) == (2, found[0])


def test_ctrl_c_ends_the_grid_and_the_same_command_continues(run: Run, trainer: Trainer, tmp_path: Path) -> None:
    trainer.ends = {1: KeyboardInterrupt()}
    assert "to continue: groundswell grid" in run(SEEDS, "--result", "result.json", code=130)
    assert trainer.client.get_run(json.loads((tmp_path / "result.json").read_text())["run_id"]).info.status == "KILLED"
    run(SEEDS)
    assert (trainer.trained, [line.resumed for line in lines(tmp_path)]) == ([0, 1, 1, 2], [False, True, False])


def test_a_training_that_could_not_be_read_is_added_by_the_next_command(
    run: Run, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared() -> str:
        assert cli.execute(["compare", "--results", "results.jsonl"]) == 0
        return capsys.readouterr().out

    answers, missing = iter([recorded_training, away, recorded_training]), "1 of 3 cells of results.jsonl are not shown"
    with monkeypatch.context() as patch:
        patch.setattr(cells, "recorded_training", lambda *given, **settings: next(answers)(*given, **settings))
        assert "no curves of cell 2: no answer from MLflow; the same command adds them" in run(SEEDS)
    before = lines(tmp_path)[1]
    assert before.run is None
    assert missing in compared()
    assert missing in (tmp_path / "comparison" / "report.html").read_text()
    run(SEEDS)
    added = lines(tmp_path)[-1]
    assert (trainer.trained, added.run.settings["training.seed"], added) == (
        [0, 1, 2],
        "1",
        before.model_copy(update={"run": added.run}),
    )
    assert "not shown" not in compared()


def test_a_training_that_is_found_has_the_metrics_of_its_model(run: Run, trainer: Trainer, tmp_path: Path) -> None:
    def found_again(text: str, later: dict[str, float]) -> dict[str, float]:
        """Metrics of a cell whose run is continued to a further epoch, and whose line is lost."""
        run(text)
        run_id = lines(tmp_path)[-1].run.run_id
        trainer.log(run_id, later, step=8)
        if "model: best" in text:
            trainer.client.set_tag(run_id, "best_epoch", "1")
        (tmp_path / "results.jsonl").unlink()
        run(text)
        return lines(tmp_path)[-1].metrics

    text = "{set: {training.selection: {metric: val/top_1, model: best}}, product: {training.seed: [0]}}"
    best = found_again(text, {"train/loss": 0.2, "val/top_1": 0.4, "val/loss": 0.7})
    assert (best, trainer.trained) == ({"train/loss": 1.0, "val/top_1": 0.5, "speed/images_per_second": 8.0}, [0])
    assert found_again("product: {training.seed: [0]}", {"train/loss": 0.2}) == {"train/loss": 0.2}


def test_a_renamed_experiment_is_named_before_spark_starts_and_its_cells_continue(
    run: Run, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.ends = {1: KeyboardInterrupt()}
    run(SEEDS, code=130)
    old, new, client = tmp_path.name, trainer.rename_experiment(), trainer.client
    with monkeypatch.context() as patch:
        patch.setattr(grid, "spark_session", None)
        told = run(SEEDS, code=2)
    assert f"was started in experiment '{old}', which is '{new}' now: set tracking.experiment={new}" in told
    assert client.get_experiment_by_name(old) is None
    before = read_lines(tmp_path / "results.jsonl")
    run(SEEDS, "--set", f"tracking.experiment={new}")
    assert (trainer.trained, trainer.resumed[2] is None) == ([0, 1, 1, 2], False)
    added = read_lines(tmp_path / "results.jsonl")[len(before) :]
    assert [line.kind for line in added] == ["cell", "cell"], "the parent is the same"
    runs = client.search_runs([client.get_experiment_by_name(new).experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 4


def test_curves_are_not_looked_for_in_another_experiment_than_the_renamed_one(
    run: Run, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cells, "recorded_training", away)
        run(SEEDS)
    new = trainer.rename_experiment()
    assert f"set tracking.experiment={new}" in run(SEEDS, code=2)
    run(SEEDS, "--set", f"tracking.experiment={new}")
    assert all(line.run is not None for line in cells_of(lines(tmp_path)).values())


@pytest.mark.parametrize("change", ["rewritten", "removed"])
def test_the_grid_file_that_was_planned_is_kept_from_the_first_cell_on(
    change: str,
    run: Run,
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    artifact_text: Callable[[str, str, str], str],
) -> None:
    kept: list[str] = []

    def train(spark: Any, config: RunConfig, manifest: Manifest, result: Result, tags: Mapping[str, str]) -> None:
        kept.append(artifact_text(trainer.store, tags[PARENT_TAG], "grid.yaml"))
        (tmp_path / "grid.yaml").unlink(missing_ok=True)
        if change == "rewritten":
            (tmp_path / "grid.yaml").write_text("product: {training.seed: [7]}")
        trainer(spark, config, manifest, result, tags)

    monkeypatch.setattr(grid, "train_on", train)
    run(SEEDS)
    (first,) = grids(tmp_path)
    assert [*kept, artifact_text(trainer.store, first.parent, "grid.yaml")] == [SEEDS] * 4


def test_an_experiment_that_is_renamed_meanwhile_ends_the_grid(
    run: Run, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*arguments: Any) -> None:
        trainer(*arguments)
        if trainer.trained == [0]:
            trainer.rename_experiment()

    monkeypatch.setattr(grid, "train_on", train)
    run(SEEDS, code=2)
    run(SEEDS, "--set", f"tracking.experiment={tmp_path.name}-2026")
    assert (trainer.trained, trainer.client.get_experiment_by_name(tmp_path.name)) == ([0, 1, 2], None)


def test_a_deleted_run_of_the_grid_is_replaced_by_a_new_one(run: Run, trainer: Trainer, tmp_path: Path) -> None:
    run("product: {training.seed: [0]}")
    trainer.client.delete_run(grids(tmp_path)[0].parent)
    run(SEEDS)
    assert [line.kind for line in read_lines(tmp_path / "results.jsonl")] == ["grid", "cell", "grid", "cell", "cell"]


def test_a_dataset_that_is_replaced_meanwhile_ends_the_grid(
    run: Run,
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eurosat_manifest: Callable[..., Manifest],
) -> None:
    for name in ("check_dataset", "read_manifest"):
        monkeypatch.setattr(cells, name, lambda _: eurosat_manifest(8 if trainer.trained else 7))
    assert "cell 2: the dataset " in run(SEEDS, code=2)
    assert trainer.trained == [0]
    run(SEEDS)
    assert (trainer.trained, len({line.cell for line in lines(tmp_path)})) == ([0, 0, 1, 2], 4)


def test_a_dead_jvm_ends_the_grid_and_blames_no_cell(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(*arguments: Any) -> None:
        monkeypatch.setattr(Spark, "alive", False)
        raise RuntimeError("no answer")

    monkeypatch.setattr(grid, "train_on", dying)
    assert "Spark's JVM died in cell 1" in run(SEEDS, code=4)
    assert lines(tmp_path) == []


def test_a_dry_run_shows_cells_and_an_estimate_and_changes_nothing(
    run: Run, trainer: Trainer, tmp_path: Path, eurosat_manifest: Callable[..., Manifest]
) -> None:
    def shown(*lines: CellLine, more: tuple[str, ...] = ()) -> list[str]:
        for line in lines:
            (tmp_path / "results.jsonl").write_text(line.model_dump_json() + "\n")
        return [" ".join(line.split()) for line in run(SEEDS, "--dry-run", *more).splitlines()]

    output = shown()
    assert (output[1], (tmp_path / "results.jsonl").exists(), output[-1]) == (
        "1 open - training.seed=0",
        False,
        "3 of 3 cells to train, no estimate: no cell is finished yet",
    )
    line = CellLine(
        cell=training_digest(load("smoke", [f"tracking.experiment={tmp_path.name}"]), eurosat_manifest().fingerprint),
        status="finished",
        settings={"training.seed": 0},
        seconds=30.0,
        epochs=2,
    )
    output = shown(line, more=("--set", "training.output=elsewhere"))
    assert (output[1:3], output[-1]) == (
        ["1 finished 30 s training.seed=0", "2 open ~30 s training.seed=1"],
        "2 of 3 cells to train, about 60 s by the finished ones",
    )
    output = shown(line.model_copy(update={"resumed": True}))
    assert output[1] == "1 finished >30 s training.seed=0", "its time before is not known"
    assert trainer.trained == []


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
        ("product: {training.epochs: [1, 0]}", (), "cell 2 (training.epochs=0): training.epochs=0: should be"),
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
        (
            "product: {launch.threads_per_worker: [1, 2]}",
            (),
            "cells 1 (launch.threads_per_worker=1) and 2 (launch.threads_per_worker=2) of grid.yaml are one training: "
            "what they differ in has no influence on its result",
        ),
    ],
)
def test_a_mistake_in_any_cell_is_one_line_before_the_first_starts(
    run: Run, trainer: Trainer, tmp_path: Path, text: str, more: tuple[str, ...], message: str
) -> None:
    (line,) = run(text, *more, code=2).splitlines()
    assert (message in line, trainer.trained, (tmp_path / "results.jsonl").exists()) == (True, [], False), line


def test_a_cell_that_is_there_twice_is_trained_once(run: Run, trainer: Trainer) -> None:
    run("[{product: {training.seed: [0, 1]}}, {cells: [{training.seed: 1, training.epochs: 2}]}]")
    assert trainer.trained == [0, 1]


def test_a_file_of_weights_counts_by_its_content(tmp_path: Path) -> None:
    def digest(name: str) -> str:
        return training_digest(load("smoke", [f"warm_start.source={tmp_path / name}"]), "abc")

    for name, content in (("a.npz", b"1"), ("b.npz", b"1"), ("c.npz", b"2")):
        (tmp_path / name).write_bytes(content)
    assert digest("a.npz") == digest("b.npz") != digest("c.npz")
    with pytest.raises(FileNotFoundError, match=r"warm_start\.source=.*/d\.npz does not exist"):
        digest("d.npz")


def test_a_cells_run_is_named_by_what_the_grid_sets(eurosat_manifest: Callable[..., Manifest]) -> None:
    values = {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "exchange.codec": "fp16", "training.seed": 1}
    named = cells.PlannedCell(Cell(1, values), load("smoke"), eurosat_manifest(), "digest")
    assert (named.name, named.cell.text) == (
        "sgd learning_rate=0.1 fp16 seed=1 digest",
        "optimizer={name: sgd, learning_rate: 0.1}, exchange.codec=fp16, training.seed=1",
    )


SAME = (
    *("training.output=x", "tracking.run_name=x", "launch.master=local[9]", "reader.verify=never"),
    *("dataset.path=elsewhere", "training.checkpoint_every_steps=3", "training.mixup=null"),
)
OTHERS = (
    *("training.seed=1", "optimizer=sgd", "optimizer=lamb", "launch.num_workers=4", "exchange.codec=fp16"),
    *("exchange.codec=powersgd", "exchange.codec={name: powersgd, rank: 3}", "schedule.warmup=none"),
    *("reader.name=petastorm", "reader.cache_limit_gib=1"),
    *("schedule.decay=cosine", "training.precision=bfloat16", "input.augmentation=flips"),
)


def test_the_digest_is_of_what_decides_the_result() -> None:
    def digest(*settings: str, fingerprint: str = "abc") -> str:
        return training_digest(load("smoke", list(settings)), fingerprint)

    assert {digest(setting) for setting in SAME} == {digest()}
    assert len({digest(), digest(fingerprint="abd"), *(digest(setting) for setting in OTHERS)}) == 2 + len(OTHERS)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.timeout(900)
def test_a_real_grid_is_killed_and_continued(
    small_dataset: Path, small_network: str, tmp_path: Path, mlflow_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grid.yaml").write_text("product: {training.seed: [0, 1]}")
    command = [
        *(COMMAND, "grid", "--config", "smoke", "--grid", "grid.yaml", "--results", "results.jsonl"),
        *("--set", f"dataset.path={small_dataset}", "--set", "training.output=out", "--set", small_network),
    ]
    results = tmp_path / "results.jsonl"
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:

        def in_second_cell() -> bool:
            """After that cell's first checkpoint."""
            assert driver.poll() is None, (tmp_path / "log").read_text()
            cells = len(list(tmp_path.glob("out/*/checkpoints/*04.npz")))
            return results.exists() and bool(lines(tmp_path)) and cells > 1

        wait_until(in_second_cell, 400)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    (first,) = lines(tmp_path)
    results.write_bytes(results.read_bytes() + b'{"format_version":1,"kind":"cell","ce')
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(400))
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("1 of 2 cells to train" in done.stdout, "2 cells: 2 finished" in done.stdout) == (True, True), done.stdout
    kept, second = lines(tmp_path)
    assert (kept, second.status, second.resumed, second.settings) == (first, "finished", True, {"training.seed": 1})
    assert second.run.history["epoch"] == [1, 2]
    assert second.metrics["val/f1_micro"] >= 0
    (grid_line,) = grids(tmp_path)
    assert MlflowClient(mlflow_store).get_run(grid_line.parent).info.status == "FINISHED"
    monkeypatch.chdir(tmp_path)
    assert cli.execute(["compare", "--results", "results.jsonl"]) == 0
    assert "±" in (tmp_path / "comparison" / "report.html").read_text(), "two seeds have a deviation"


def test_a_store_that_does_not_answer_is_told_before_spark_starts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(grid, "spark_session", None)
    assert "no answer from MLflow at http:" in run(SEEDS, code=4)


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
    assert (exit_code(named), str(named)) == (code, f"cell 2 (training.seed=1): {error}")


def test_a_dataset_that_may_not_be_read_is_told_with_its_cell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(config: RunConfig) -> Manifest:  # the administrator, who may run this, can read everything
        raise PermissionError(13, "Permission denied", config.dataset.path)

    monkeypatch.setattr(cells, "check_dataset", denied)
    (line,) = run(SEEDS, "--set", "dataset.path=/data/bigearthnet", code=2).splitlines()
    assert "cell 1 (training.seed=0): [Errno 13] Permission denied: '/data/bigearthnet'" in line
