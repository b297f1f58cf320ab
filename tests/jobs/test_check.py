"""`groundswell check`: one line per part, and the exit code of the worst."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from jobs.shell import cli
from pipelines.tracking.store.runs import start_run

pytestmark = [pytest.mark.spark, pytest.mark.parallel]

Check = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def check(
    spark: SparkSession,
    mlflow_store: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> Check:
    """Run the verb: its exit code, and the line of every part."""

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
    expected = {
        "configuration": "^ok resnet, lars, codec none, 2 epochs, 2 workers x 4 samples",
        "dataset": f"^ok {small_dataset}: .*train 32.* 19 classes$",
        "storage": f"^ok {tmp_path}/outputs can be written$",
        "tracking": "which the first run creates",
        "cluster": "^ok 2 workers started on 1 host: ",
    }
    assert [part for part, text in expected.items() if not re.search(text, lines[part])] == [], lines
    assert not (tmp_path / "mlruns").exists()


def test_every_problem_is_named_and_the_others_are_looked_at(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (tmp_path / "file").write_text("")
    result = tmp_path / "result.json"
    settings = ("dataset.path=nowhere", "training.output=file/outputs", "launch.num_workers=3")
    code, lines = check("--config", "smoke", "--result", str(result), settings=settings)
    expected = {
        "configuration": "^ok ",
        "dataset": "nowhere is not a finished dataset",
        "storage": "^problem .*file",
        "tracking": "no answer from MLflow",
        "cluster": "3 workers do not fit 2 slots",
        "error": "^groundswell check: error: 4 problems, see above\n$",
    }
    assert [part for part, text in expected.items() if not re.search(text, lines[part])] == [], lines
    assert (code, json.loads(result.read_text())["exit_code"]) == (2, 2)


def test_a_deleted_experiment_is_a_problem_for_a_new_run_only(
    check: Check, small_dataset: Path, mlflow_store: str
) -> None:
    run, client = start_run("gone", None, {}, {}), MlflowClient(mlflow_store)
    client.delete_experiment(client.get_experiment_by_name("gone").experiment_id)
    # More workers than slots: no rank is started.
    settings = (f"dataset.path={small_dataset}", "tracking.experiment=gone", "launch.num_workers=3")
    code, lines = check("--config", "smoke", settings=settings)
    assert code == 2
    assert "problem tracking.experiment=gone is deleted in" in lines["tracking"]
    _, lines = check("--config", "smoke", settings=(*settings, f"training.resume_run={run.run_id}"))
    assert lines["tracking"].endswith(" answers")


def test_latest_is_the_newest_unfinished_run(check: Check, small_dataset: Path) -> None:
    settings = (f"dataset.path={small_dataset}", "launch.num_workers=3")
    code, lines = check("--config", "smoke", settings=(*settings, "training.resume_run=latest"))
    assert (code, [part for part, line in lines.items() if line.startswith("problem ")]) == (2, ["resume", "cluster"])
    _, lines = check("--config", "smoke", settings=(*settings, "training.resume_run=0123"))
    assert "resume" not in lines


def test_what_only_the_infrastructure_lacks_is_code_4(check: Check, small_dataset: Path) -> None:
    code, lines = check("--config", "smoke", settings=(f"dataset.path={small_dataset}", "launch.num_workers=3"))
    assert (code, lines["error"]) == (4, "groundswell check: error: 1 problem, see above\n")


def test_a_dataset_is_read_whole(check: Check, small_dataset: Path, tmp_path: Path) -> None:
    shards, damaged = len(list(small_dataset.glob("*/part-*.parquet"))), tmp_path / "damaged"
    shutil.copytree(small_dataset, damaged)
    shard = min(damaged.glob("train/part-*.parquet"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for dataset, code, line in (
        (small_dataset, 0, f"ok {small_dataset}: 56 rows in {shards} shards are whole"),
        (damaged, 2, f"problem {damaged} is damaged:"),
        ("nowhere", 2, "nowhere is not a finished dataset"),
    ):
        found, lines = check("--dataset", str(dataset))
        assert (found, line in lines["rows"]) == (code, True), lines


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("check", "give --config NAME|PATH, or --dataset PATH"),
        ("check --dataset x --set training.epochs=3", "--set has no effect without --config"),
    ],
)
def test_something_must_be_named(command: str, message: str, error_line: Callable[..., str]) -> None:
    assert message in error_line(*command.split())
