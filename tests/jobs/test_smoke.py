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
from jobs.evaluate import evaluate, per_class_lines
from jobs.prepare import prepare
from jobs.shell import cli
from jobs.train import TrainedRun, train
from pipelines.dataset.format.manifest import read_manifest
from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE
from pipelines.launch.runner import WorkerError
from pipelines.tracking import metrics
from pipelines.tracking.models.models import model_metadata
from pipelines.training.checkpoint.files import list_checkpoints
from pipelines.training.checkpoint.state import newest_state
from pipelines.training.driver.checks import check_resume
from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(240)]
pytestmark += [pytest.mark.usefixtures("module_mlflow_store")]  # one for all tests
RUN_NAME = "cifar2-lars-g8-2w-2e-s0-"


def config(dataset: Path, output: Path, *settings: str) -> RunConfig:
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", *settings])


@pytest.fixture(scope="module")
def trained(
    spark: SparkSession,
    small_archive: Path,
    small_network: str,
    store_of_module: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TrainedRun, RunConfig]:
    """Prepare and train once, as `groundswell prepare` and `groundswell train` do."""
    folder = tmp_path_factory.mktemp("smoke")
    more = (f"archive.root={small_archive}", small_network, "tracking.system_seconds=0.2")
    chosen = config(folder / "dataset", folder / "outputs", *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store_of_module)
        patch.delenv(FORK_SERVER_VARIABLE)  # its ranks are new interpreters, as users have them
        prepare(chosen)
        return train(chosen), chosen


def test_the_job_in_sparks_page_has_the_runs_name(spark: SparkSession, trained: tuple[TrainedRun, RunConfig]) -> None:
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    shown = [str(jobs.apply(number).description()) for number in range(jobs.size())]
    assert any(text.startswith(f"Some(groundswell train: {RUN_NAME}") for text in shown)


def test_the_run_holds_what_a_reader_looks_for(
    trained: tuple[TrainedRun, RunConfig], store_of_module: str, artifact_text: Callable[[str, str, str], str]
) -> None:
    result, chosen = trained
    client, run_id = MlflowClient(store_of_module), result.run.run_id
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name[: len(RUN_NAME)]) == ("FINISHED", RUN_NAME)
    assert run.data.params.items() >= {"model.depth": "2", "global_batch_size": "8"}.items()
    assert (
        len(run.data.params["dataset_fingerprint"]),
        bool(run.data.tags["groundswell.version"]),
        run.data.tags["archive"],
    ) == (64, True, "bigearthnet_v2")
    files = {item.path for folder in ("", "environment", "logs") for item in client.list_artifacts(run_id, folder)}
    assert files >= {
        "config.yaml",
        "dataset.json",
        "confusion_validation.png",
        "learning_curves.png",
        "learning_rate.png",
        "per_class_validation.png",
        "per_class_validation.json",
        "precision_recall_validation.png",
        "predictions_validation.png",
        "where_the_step_goes.json",
        "where_the_step_goes.png",
        "summary.json",
    }
    assert {file for file in files if "/" in file} == {
        *("environment/driver.json", "environment/packages.txt", "environment/ranks.json"),
        *("logs/rank-0.log", "logs/rank-1.log"),
    }
    (dataset,) = (each.dataset for each in run.inputs.dataset_inputs)
    assert dataset.name == "bigearthnet_v2"
    assert run.data.metrics.items() >= {"time/samples_seen": 64, "time/workers": 2}.items()
    rows = json.loads(artifact_text(store_of_module, run_id, "where_the_step_goes.json"))
    assert [row[:2] for row in rows["data"]] == [[1, 0], [1, 1], [2, 0], [2, 1]]
    for rank in (0, 1):
        assert 0 <= run.data.metrics[f"system/rank-{rank}/cpu_utilization_percentage"] <= 100
        assert (
            f"rank {rank} of 2: 32 training samples" in (result.folder / "logs" / f"rank-{rank}.log").path.read_text()
        )
    table = json.loads(artifact_text(store_of_module, run_id, "per_class_validation.json"))
    assert (len(table["data"]), table["columns"][0]) == (19, "class")
    each_epoch, each_step = [4, 8], list(range(8))
    steps = {
        **dict.fromkeys(("train/loss", "val/loss", "val/f1_micro", "val/f1_macro"), each_epoch),
        "val/mean_average_precision": each_epoch,
        **dict.fromkeys(("train/learning_rate", "train/step_loss", "exchange/payload_bytes"), each_step),
        "exchange/residual_norm": each_step,
        "time/collective_seconds": each_step[1:],  # the first step compiles
    }
    found = {name: client.get_metric_history(run_id, name) for name in steps}
    assert {name: [point.step for point in points] for name, points in found.items()} == steps
    # One epoch of warm-up: 4 steps of 8 samples each.
    peak, rates = 8.0 * 8 / 256, [point.value for point in found["train/learning_rate"]]
    assert rates[:5] == pytest.approx([peak / 4, peak / 2, peak * 3 / 4, peak, peak / 10])
    assert chosen.training.epochs == len(result.summary.history) == 2


def test_checkpoints_are_kept_and_what_is_sent_is_counted(
    trained: tuple[TrainedRun, RunConfig], store_of_module: str
) -> None:
    result, _ = trained
    assert [path.name for path in list_checkpoints(result.folder / "checkpoints")] == [
        "step-00000004.npz",
        "step-00000008.npz",
    ]
    assert result.summary.checkpoint.endswith("step-00000008.npz")
    logged = MlflowClient(store_of_module).get_run(result.run.run_id).data.metrics["exchange/payload_bytes"]
    # Every gradient in float32.
    parameters = MlflowClient(store_of_module).get_run(result.run.run_id).data.metrics["summary/parameters"]
    assert logged == result.summary.payload_bytes_per_step == 4 * parameters


def test_evaluation_scores_the_test_split(trained: tuple[TrainedRun, RunConfig], store_of_module: str) -> None:
    result, chosen = trained
    evaluation = evaluate(chosen, result.summary.model_uri)
    assert 0 <= evaluation.metrics["f1_micro"] <= 1
    logged = model_metadata(result.summary.model_uri).thresholds or ()
    assert len(logged) == len(evaluation.per_class), "training has tuned one for each class"
    assert sum(row["support"] for row in evaluation.per_class) > 12
    assert len(per_class_lines(evaluation)) == 20
    stored = MlflowClient(store_of_module).get_run(result.run.run_id).data.metrics
    assert stored["test/f1_micro"] == evaluation.metrics["f1_micro"]
    # Training and evaluation write what `groundswell list metrics` says, and nothing else.
    # Of another task, of settings, of find-rate, of known processors; and samples, of which a short run has none.
    others = ("top_", "val_ema/", "test_ema/", "train/skipped_steps", "train/image_height", "time/idle_share")
    others += ("exchange/staleness", "exchange/dropped_share", "exchange/step_gap_max", "range_test/")
    others += ("share_of_peak", "_to_target")
    assert ({name for name in stored if not name.startswith("system/")} - {"summary/share_of_peak"}) == {
        name for name in metrics.described() if not any(part in name for part in others)
    }


@pytest.mark.long
def test_a_resumed_run_ends_with_the_weights_of_one_that_never_stopped(
    spark: SparkSession, small_dataset: Path, small_network: str, tmp_path: Path
) -> None:
    result = train(config(small_dataset, tmp_path / "first", small_network))
    # As if it had been stopped after its first epoch.
    stopped = shutil.copytree(result.folder, tmp_path / result.run.run_id, ignore=shutil.ignore_patterns("step-*"))
    shutil.copy(result.folder / "checkpoints" / "step-00000004.npz", stopped / "checkpoints")
    again = train(config(small_dataset, tmp_path, small_network, f"training.resume_run={result.run.run_id}"))
    assert (again.run.run_id, [row["train/loss"] for row in again.summary.history]) == (
        result.run.run_id,
        [row["train/loss"] for row in result.summary.history],
    )
    with np.load(result.summary.checkpoint) as expected, np.load(again.summary.checkpoint) as found:
        files = [{name: file[name] for name in file.files if name != "state.json"} for file in (found, expected)]
    np.testing.assert_equal(*files)


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
    spark: SparkSession,
    small_archive: Path,
    small_dataset: Path,
    small_network: str,
    store_of_module: str,
    tmp_path: Path,
) -> None:
    settings, client = (small_network, "training.epochs=1", "reader.name=petastorm"), MlflowClient(store_of_module)
    run = client.get_run(train(config(small_dataset, tmp_path, *settings)).run.run_id)
    assert run.data.params["reader.name"] == "petastorm"
    assert 0 <= run.data.metrics["time/input_wait_fraction"] < 1
    assert len(client.get_metric_history(run.info.run_id, "train/learning_rate")) == 4  # 32 samples, 8 a step
    one_row_group = tmp_path / "one row group"
    prepare(config(one_row_group, tmp_path, f"archive.root={small_archive}"))
    with pytest.raises(ValueError, match=r"Petastorm's reader.*has 1 for 2 workers"):
        train(config(one_row_group, tmp_path, *settings))


@pytest.mark.long
def test_a_run_whose_worker_fails_is_failed_and_keeps_its_logs(
    spark: SparkSession, small_dataset: Path, small_network: str, store_of_module: str, tmp_path: Path
) -> None:
    settings = (small_network, "optimizer.learning_rate_per_256=1e30", "tracking.experiment=failing")
    reason = r"FloatingPointError: (the loss is (nan|inf|-inf)|gradients are not finite) on rank \d at step"
    with pytest.raises(WorkerError, match=reason):
        train(config(small_dataset, tmp_path, *settings))
    client = MlflowClient(store_of_module)
    (run,) = client.search_runs([client.get_experiment_by_name("failing").experiment_id])
    assert run.info.status == "FAILED"
    assert client.list_artifacts(run.info.run_id, "logs")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_and_micro_batches_train_to_the_end(
    spark: SparkSession,
    small_dataset: Path,
    small_network: str,
    tmp_path: Path,
    precision: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = ("training.accumulation_steps=2", "training.batch_size_per_worker=2")
    result = train(config(small_dataset, tmp_path, small_network, f"training.precision={precision}", *batches))
    assert f"training.precision={precision}" in capsys.readouterr().out
    last = result.summary.history[-1]
    assert last["train/loss"] > 0
    assert ("train/skipped_steps" in last) == (precision == "float16")
    state = newest_state(result.folder / "checkpoints")[1]
    assert (state.step, state.global_batch_size) == (8, 8)  # 32 samples, two epochs
    with np.load(result.summary.checkpoint) as saved:
        assert (
            {saved[name].dtype.name for name in saved.files if saved[name].dtype.kind == "f"},
            any("loss_scale" in name for name in saved.files),
        ) == ({"float32"}, precision == "float16")


@pytest.mark.long
def test_spark_submit_trains(
    small_dataset: Path, small_network: str, project: Path, store_of_module: str, tmp_path: Path
) -> None:
    bin_folder = Path(sys.executable).parent
    command = [
        str(bin_folder / "spark-submit"), "--master", "local[3]", str(project / "jobs" / "train.py"),
        "--config", "smoke",
        "--set", f"dataset.path={small_dataset}",
        "--set", f"training.output={tmp_path}",
        "--set", "training.epochs=1",
        "--set", small_network,
        # Fits spark-submit's three slots, not the configuration's two.
        "--set", "launch.num_workers=3",
        "--set", "exchange.codec=fp16",
        "--set", "input.augmentation=dihedral",
        "--set", "tracking.registered_model=submitted",
    ]  # fmt: skip
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "MLFLOW_TRACKING_URI": store_of_module}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=patient(200))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 1/1: loss" in done.stdout
    assert "\nregistered  submitted version 1 is champion: there is no other champion, val/f1_macro 0." in done.stdout
    assert len(model_metadata("models:/submitted/1").class_names) == 19


@pytest.mark.long
def test_the_demos_command_on_the_real_patches(
    spark: SparkSession,
    shared_data: Path,
    small_network: str,
    store_of_module: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    archive = str(shared_data / "bigearthnet_v2")
    assert cli.execute(["demo", "--archive", archive, "--set", "training.epochs=1", "--set", small_network]) == 0
    output = capsys.readouterr().out
    run_id = next(line.split()[-1] for line in output.splitlines() if line.startswith("MLflow run  "))
    run = MlflowClient(store_of_module).get_run(run_id)
    assert (run.info.status, "test/f1_micro" in run.data.metrics) == ("FINISHED", True), run.data.metrics
    manifest = json.loads((folder / "demo-bigearthnet_v2" / "dataset" / "dataset.json").read_text())
    rows = {name: sum(sum(s["row_groups"]) for s in split["shards"]) for name, split in manifest["splits"].items()}
    assert rows == {"train": 17, "validation": 8, "test": 5}
