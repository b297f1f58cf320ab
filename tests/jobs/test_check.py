"""`groundswell check`: one line per part, and the exit code of the worst."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from jobs import cli
from pipelines.tracking.runs import start_run

pytestmark = [pytest.mark.spark, pytest.mark.parallel]

Check = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def check(
    spark: SparkSession,
    mlflow_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Check:
    """Run the verb: its exit code, and the line of every part."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, settings: tuple[str, ...] = ()) -> tuple[int, dict[str, str]]:
        code = cli.execute(["check", *arguments, *(part for setting in settings for part in ("--set", setting))])
        captured = capsys.readouterr()
        lines = [line.split(None, 2) for line in captured.out.splitlines() if line.startswith(("ok ", "problem "))]
        return code, {part: f"{verdict} {text}" for verdict, part, text in lines} | {"error": captured.err}

    return run


def test_everything_is_well(check: Check, small_dataset: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "mlruns")  # the store of the fixture
    code, lines = check("--config", "smoke", settings=(f"dataset.path={small_dataset}",))
    assert code == 0, lines
    assert lines["configuration"].startswith("ok resnet, lars, codec none, 2 epochs, 2 workers x 4 samples")
    assert lines["dataset"].startswith(f"ok {small_dataset}: ")
    assert "train 32" in lines["dataset"]
    assert "19 classes" in lines["dataset"]
    assert lines["storage"] == f"ok {tmp_path}/outputs can be written"
    assert "which the first run creates" in lines["tracking"]
    assert lines["cluster"].startswith("ok 2 workers started on 1 host: ")
    assert not (tmp_path / "mlruns").exists()


def test_every_problem_is_named_and_the_others_are_looked_at(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (tmp_path / "file").write_text("")
    result = tmp_path / "result.json"
    settings = ("dataset.path=nowhere", "training.output=file/outputs", "launch.num_workers=3")
    code, lines = check("--config", "smoke", "--result", str(result), settings=settings)
    assert code == 2
    assert lines["configuration"].startswith("ok ")
    assert "nowhere is not a finished dataset" in lines["dataset"]
    assert lines["storage"].startswith("problem ")
    assert "file" in lines["storage"]
    assert "no answer from MLflow" in lines["tracking"]
    assert "3 workers do not fit 2 slots" in lines["cluster"]
    assert lines["error"] == "groundswell check: error: 4 problems, see above\n"
    assert json.loads(result.read_text())["exit_code"] == 2


def test_a_deleted_experiment_is_a_problem_for_a_new_run_only(
    check: Check, small_dataset: Path, mlflow_store: str
) -> None:
    run = start_run("gone", None, {}, {})
    client = MlflowClient(mlflow_store)
    client.delete_experiment(client.get_experiment_by_name("gone").experiment_id)
    settings = (f"dataset.path={small_dataset}", "tracking.experiment=gone")
    code, lines = check("--config", "smoke", settings=settings)
    assert code == 2
    assert "problem tracking.experiment=gone is deleted in" in lines["tracking"]
    _, lines = check("--config", "smoke", settings=(*settings, f"training.resume_run={run.run_id}"))
    assert lines["tracking"].endswith(" answers")


def test_latest_is_the_newest_unfinished_run(check: Check, small_dataset: Path) -> None:
    settings = (f"dataset.path={small_dataset}", "training.resume_run=latest")
    code, lines = check("--config", "smoke", settings=settings)
    assert code == 2
    assert lines["resume"].startswith("problem ")
    assert [part for part, line in lines.items() if line.startswith("problem ")] == ["resume"]
    _, lines = check("--config", "smoke", settings=(f"dataset.path={small_dataset}", "training.resume_run=0123"))
    assert "resume" not in lines


def test_what_only_the_infrastructure_lacks_is_code_4(check: Check, small_dataset: Path) -> None:
    code, lines = check("--config", "smoke", settings=(f"dataset.path={small_dataset}", "launch.num_workers=3"))
    assert code == 4
    assert lines["error"] == "groundswell check: error: 1 problem, see above\n"


def test_a_dataset_is_read_whole(check: Check, small_dataset: Path, tmp_path: Path) -> None:
    code, lines = check("--dataset", str(small_dataset))
    assert code == 0
    shards = len(list(small_dataset.glob("*/part-*.parquet")))
    assert lines["rows"] == f"ok {small_dataset}: 56 rows in {shards} shards are whole"
    damaged = tmp_path / "damaged"
    shutil.copytree(small_dataset, damaged)
    shard = sorted(damaged.glob("train/part-*.parquet"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, lines = check("--dataset", str(damaged))
    assert code == 2
    assert lines["rows"] == f"problem {damaged} is damaged:"
    code, lines = check("--dataset", "nowhere")
    assert code == 2
    assert "nowhere is not a finished dataset" in lines["rows"]


def test_something_must_be_named(check: Check) -> None:
    code, lines = check()
    assert code == 2
    assert "give --config NAME|PATH, or --dataset PATH" in lines["error"]
    code, lines = check("--dataset", "x", settings=("training.epochs=3",))
    assert code == 2
    assert "--set has no effect without --config" in lines["error"]
