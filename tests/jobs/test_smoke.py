"""The whole way on a small archive: generate, prepare, train on two barrier workers, evaluate, resume."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs import cli
from jobs.evaluate import evaluate, per_class_lines
from jobs.prepare import prepare
from jobs.train import TrainedRun, train
from pipelines.dataset.manifest import read_manifest
from pipelines.launch.runner import WorkerError
from pipelines.tracking import metrics
from pipelines.training.checkpoint import list_checkpoints, newest_state
from pipelines.training.checks import check_resume

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(240)]


def config(dataset: Path, output: Path, *settings: str) -> RunConfig:
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", *settings])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def _use_store(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)


@pytest.fixture(scope="module")
def trained(
    spark: SparkSession, small_archive: Path, store: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainedRun, RunConfig]:
    """Prepare and train once, as `groundswell prepare` and `groundswell train` do."""
    folder = tmp_path_factory.mktemp("smoke")
    before = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = store
    try:
        chosen = config(folder / "dataset", folder / "outputs", f"archive.root={small_archive}")
        prepare(chosen)
        return train(chosen), chosen
    finally:
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


def test_the_run_holds_what_a_reader_looks_for(
    trained: tuple[TrainedRun, RunConfig], store: str, artifact_text: Callable[[str, str, str], str]
) -> None:
    result, chosen = trained
    client = MlflowClient(store)
    run = client.get_run(result.run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["model.depth"] == "18"
    assert run.data.params["global_batch_size"] == "8"
    assert len(run.data.params["dataset_fingerprint"]) == 64
    assert run.data.tags["groundswell.version"]
    artifacts = {item.path for item in client.list_artifacts(result.run.run_id)}
    assert artifacts >= {
        "config.yaml",
        "dataset.json",
        "learning_curves.png",
        "learning_rate.png",
        "per_class_validation.png",
        "per_class_validation.json",
        "logs",
    }
    assert {item.path for item in client.list_artifacts(result.run.run_id, "logs")} == {
        "logs/rank-0.log",
        "logs/rank-1.log",
    }
    for rank in (0, 1):
        assert f"rank {rank} of 2: 32 training samples" in (result.folder / "logs" / f"rank-{rank}.log").read_text()
    table = json.loads(artifact_text(store, result.run.run_id, "per_class_validation.json"))
    assert len(table["data"]) == 19
    assert table["columns"][0] == "class"
    for name in ("train/loss", "val/loss", "val/f1_micro", "val/f1_macro", "val/mean_average_precision"):
        assert [metric.step for metric in client.get_metric_history(result.run.run_id, name)] == [4, 8], name
    rates = client.get_metric_history(result.run.run_id, "train/learning_rate")
    assert [metric.step for metric in rates] == list(range(8))
    # One epoch of warm-up: 4 steps of 8 samples each.
    peak = 8.0 * 8 / 256
    assert [metric.value for metric in rates[:4]] == pytest.approx([peak / 4, peak / 2, peak * 3 / 4, peak])
    assert rates[4].value == pytest.approx(peak / 10)
    assert chosen.training.epochs == len(result.summary.history) == 2
    for name in ("train/step_loss", "exchange/payload_bytes", "exchange/residual_norm", "time/collective_seconds"):
        values = client.get_metric_history(result.run.run_id, name)
        assert [metric.step for metric in values] == list(range(8)), name


def test_checkpoints_are_kept(trained: tuple[TrainedRun, RunConfig]) -> None:
    result, _ = trained
    assert [path.name for path in list_checkpoints(result.folder / "checkpoints")] == [
        "step-00000004.npz",
        "step-00000008.npz",
    ]
    assert result.summary.checkpoint.endswith("step-00000008.npz")


def test_what_is_sent_is_counted(trained: tuple[TrainedRun, RunConfig], store: str) -> None:
    result, _ = trained
    logged = MlflowClient(store).get_run(result.run.run_id).data.metrics["exchange/payload_bytes"]
    assert logged == result.summary.payload_bytes_per_step > 100_000


def test_evaluation_scores_the_test_split(trained: tuple[TrainedRun, RunConfig], store: str) -> None:
    result, chosen = trained
    evaluation = evaluate(chosen, result.summary.model_uri)
    assert 0 <= evaluation.metrics["f1_micro"] <= 1
    assert sum(row["support"] for row in evaluation.per_class) > 12
    assert len(per_class_lines(evaluation)) == 20
    run = MlflowClient(store).get_run(result.run.run_id)
    assert run.data.metrics["test/f1_micro"] == evaluation.metrics["f1_micro"]
    # Training and evaluation write what `groundswell list metrics` says, and nothing else.
    others = ("/top_", "val_ema/", "train/skipped_steps", "range_test/")  # of another task, of settings, of find-rate
    assert set(run.data.metrics) == {name for name in metrics.described() if not any(part in name for part in others)}


@pytest.mark.long
def test_one_rank_counts_what_two_do(trained: tuple[TrainedRun, RunConfig]) -> None:
    result, chosen = trained
    both = evaluate(chosen, result.summary.model_uri)
    alone = evaluate(chosen.model_copy(update={"launch": chosen.launch.model_copy(update={"num_workers": 1})}),
                     result.summary.model_uri)  # fmt: skip
    assert alone.metrics == pytest.approx(both.metrics, abs=1e-6)


@pytest.mark.long
def test_a_resumed_run_ends_with_the_weights_of_one_that_never_stopped(
    trained: tuple[TrainedRun, RunConfig], store: str, tmp_path: Path
) -> None:
    result, chosen = trained
    # As if it had been stopped after its first epoch.
    checkpoints = tmp_path / result.run.run_id / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copy(result.folder / "checkpoints" / "step-00000004.npz", checkpoints)
    training = chosen.training.model_copy(update={"output": str(tmp_path), "resume_run": result.run.run_id})
    again = train(chosen.model_copy(update={"training": training}))
    assert again.run.run_id == result.run.run_id
    assert [row["train/loss"] for row in again.summary.history] == [row["train/loss"] for row in result.summary.history]
    with np.load(result.summary.checkpoint) as expected, np.load(again.summary.checkpoint) as found:
        assert expected.files == found.files
        for name in set(expected.files) - {"state.json"}:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({}, "has done 2 epochs, and the model is logged: raise training.epochs"),
        ({"epochs": 3, "seed": 5}, "training.seed was 0, is 5"),
        ({"epochs": 3, "batch_size_per_worker": 8}, "the global batch size was 8, is 16"),
        ({"epochs": 3, "output": "elsewhere"}, "no checkpoints in elsewhere"),
    ],
)
def test_resuming_otherwise_is_refused(
    trained: tuple[TrainedRun, RunConfig], training: dict[str, object], message: str
) -> None:
    result, chosen = trained
    changed = chosen.training.model_copy(update={"resume_run": result.run.run_id, **training})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_resume(chosen.model_copy(update={"training": changed}), read_manifest(Path(chosen.dataset.path)))


@pytest.mark.long
def test_petastorms_reader_trains_too(
    trained: tuple[TrainedRun, RunConfig], small_dataset: Path, store: str, tmp_path: Path
) -> None:
    settings = ("training.epochs=1", "reader.name=petastorm")
    chosen = config(small_dataset, tmp_path, *settings)
    result = train(chosen)
    run = MlflowClient(store).get_run(result.run.run_id)
    assert run.data.params["reader.name"] == "petastorm"
    assert 0 <= run.data.metrics["time/input_wait_fraction"] < 1
    rates = MlflowClient(store).get_metric_history(result.run.run_id, "train/learning_rate")
    assert len(rates) == 4  # 32 samples, 8 a step
    one_row_group = trained[1].dataset.path
    with pytest.raises(ValueError, match=r"Petastorm's reader.*has 1 for 2 workers"):
        train(config(Path(one_row_group), tmp_path, *settings))


@pytest.mark.long
def test_a_run_whose_worker_fails_is_failed_and_keeps_its_logs(
    trained: tuple[TrainedRun, RunConfig], store: str, tmp_path: Path
) -> None:
    _, chosen = trained
    hot = chosen.optimizer.model_copy(update={"learning_rate_per_256": 1e30})
    training = chosen.training.model_copy(update={"output": str(tmp_path)})
    tracking = chosen.tracking.model_copy(update={"experiment": "failing"})
    with pytest.raises(
        WorkerError,
        match=r"FloatingPointError: (the loss is (nan|inf|-inf)|gradients are not finite) on rank \d at step",
    ):
        train(chosen.model_copy(update={"optimizer": hot, "training": training, "tracking": tracking}))
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("failing")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert client.list_artifacts(run.info.run_id, "logs")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_and_micro_batches_train_to_the_end(
    trained: tuple[TrainedRun, RunConfig], tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, chosen = trained
    changes = {"precision": precision, "accumulation_steps": 2, "batch_size_per_worker": 2, "output": str(tmp_path)}
    result = train(chosen.model_copy(update={"training": chosen.training.model_copy(update=changes)}))
    assert f"training.precision={precision}" in capsys.readouterr().out
    last = result.summary.history[-1]
    assert last["train/loss"] > 0
    assert ("train/skipped_steps" in last) == (precision == "float16")
    state = newest_state(result.folder / "checkpoints")[1]
    assert (state.step, state.global_batch_size) == (8, 8)  # 32 samples, two epochs
    with np.load(result.summary.checkpoint) as saved:
        assert {saved[name].dtype.name for name in saved.files if saved[name].dtype.kind == "f"} == {"float32"}
        assert any("loss_scale" in name for name in saved.files) == (precision == "float16")


@pytest.mark.long
def test_spark_submit_trains(trained: tuple[TrainedRun, RunConfig], project: Path, store: str, tmp_path: Path) -> None:
    _, chosen = trained
    bin_folder = Path(sys.executable).parent
    command = [
        str(bin_folder / "spark-submit"), "--master", "local[3]", str(project / "jobs" / "train.py"),
        "--config", "smoke",
        "--set", f"dataset.path={chosen.dataset.path}",
        "--set", f"training.output={tmp_path}",
        "--set", "training.epochs=1",
        # Fits spark-submit's three slots, not the configuration's two.
        "--set", "launch.num_workers=3",
        "--set", "exchange.codec=fp16",
        "--set", "input.augmentation=dihedral",
        "--set", "tracking.registered_model=submitted",
    ]  # fmt: skip
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "MLFLOW_TRACKING_URI": store}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 1/1: loss" in done.stdout
    description = evaluate_metadata("models:/submitted/1")
    assert len(description["class_names"]) == 19


def evaluate_metadata(uri: str) -> dict[str, object]:
    from pipelines.tracking.models import model_metadata

    return model_metadata(uri)


def test_the_console_script_lists_its_verbs() -> None:
    command = Path(sys.executable).parent / "groundswell"
    done = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for verb in ("prepare", "train", "evaluate", "benchmark-reader", "demo"):
        assert verb in done.stdout
    assert subprocess.run([command, "tarin"], capture_output=True, timeout=60).returncode == 2


@pytest.mark.long
def test_the_demos_command_on_the_real_patches(
    spark: SparkSession,
    shared_data: Path,
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--archive", str(shared_data / "bigearthnet_v2")]
    for setting in ("training.epochs=1", "model.depth=18", "model.width_factor=0.25"):
        arguments += ["--set", setting]
    assert cli.execute(["demo", *arguments]) == 0
    output = capsys.readouterr().out
    run_id = next(line.split()[-1] for line in output.splitlines() if line.startswith("MLflow run  "))
    run = MlflowClient(store).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert "test/f1_micro" in run.data.metrics
    manifest = json.loads((tmp_path / "demo-bigearthnet_v2" / "dataset" / "dataset.json").read_text())
    rows = {name: sum(sum(s["row_groups"]) for s in split["shards"]) for name, split in manifest["splits"].items()}
    assert rows == {"train": 17, "validation": 8, "test": 5}
