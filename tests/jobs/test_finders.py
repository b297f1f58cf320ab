"""`groundswell find-rate` and `find-batch` as a user meets them."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from jobs import cli
from jobs.find_rate import conclusion, table
from jobs.train import _say_what_memory_needs
from pipelines.launch.failure import Outcome, RankLostError
from pipelines.training.finders.rates import RangeTest, RatePoint, Suggestion

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["find-rate", "--low", "1", "--high", "0.5"], "the rates must rise from above 0, got 1 to 0.5"),
        (["find-rate", "--steps", "9"], "a range test needs at least 10 steps, got --steps 9"),
        (["find-rate", "--set", "schedule.decay=cosine"], "--set schedule.decay has no effect: find-rate reads"),
        (
            ["find-rate", "--set", "training.resume_run=x"],
            "--set training.resume_run has no effect: find-rate does not",
        ),
        (["find-batch", "--at-most", "0"], "--at-most: should be a whole number above 0, got '0'"),
        (["find-batch", "--set", "training.batch_size_per_worker=8"], "has no effect: find-batch does not read it"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute([arguments[0], "--config", "smoke", *arguments[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(("exit_code", "lines"), [(-9, 1), (-11, 0), (None, 0)])
def test_a_killed_rank_has_a_hint_at_memory(
    exit_code: int | None, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RankLostError([Outcome(0, "here", "died", "killed", exit_code)])
    _say_what_memory_needs(error, load("smoke"))
    found = [line for line in capsys.readouterr().out.splitlines() if "lower training.batch_size_per_worker=4" in line]
    assert len(found) == lines


def test_the_table_marks_what_the_suggestion_follows_from() -> None:
    points = [RatePoint(10.0 ** (step - 5), 1.0, 1.0 - 0.1 * step) for step in range(6)]
    lines = table(points, Suggestion(1e-3, steepest=1e-3, lowest=1.0))
    assert [line.split()[-1] for line in lines[1:] if "e" in line.split()[-1]] == ["steepest", "lowest"]
    test = RangeTest(points, diverged=True)
    per_256 = conclusion(load("smoke"), test, Suggestion(0.125, 0.125, 2.0))[1]
    # The configured peak is 8 * 8 / 256 = 0.25.
    assert per_256 == "suggestion: a peak of 0.125, which is --set optimizer.learning_rate_per_256=4"
    absolute = conclusion(load("smoke", ["optimizer={name: lars, learning_rate: 7}"]), test, Suggestion(2.0, 2.0, 30.0))
    assert absolute[1] == "suggestion: a peak of 2, which is --set optimizer.learning_rate=2"
    assert "no suggestion" in conclusion(load("smoke"), test, None)[0]


@pytest.mark.long
def test_a_rate_is_found_and_recorded(
    spark: SparkSession,
    small_dataset: Path,
    mlflow_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["find-rate", "--config", "smoke", "--set", f"dataset.path={small_dataset}", "--steps", "24"]
    command += ["--set", "training.accumulation_steps=2", "--set", "training.batch_size_per_worker=2"]
    command += ["--set", "optimizer={name: sgd, learning_rate: 1.0, momentum: 0.9}", "--low", "0.001", "--high", "1e7"]
    assert cli.execute([*command, "--plot", "rates.png", "--result", "result.json"]) == 0
    output = capsys.readouterr().out
    assert "the loss diverged" in output
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "result.json").read_text())
    client = MlflowClient(mlflow_store)
    run = client.get_run(result["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.name"] == "sgd"
    losses = client.get_metric_history(result["run_id"], "range_test/smoothed_loss")
    assert 1 < len(losses) < 24
    assert {item.path for item in client.list_artifacts(result["run_id"])} == {"range_test.png"}
    assert not (tmp_path / "outputs").exists(), "nothing of a training is touched"


@pytest.mark.long
def test_a_batch_is_found(
    spark: SparkSession, small_dataset: Path, mlflow_store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["find-batch", "--config", "smoke", "--set", f"dataset.path={small_dataset}", "--at-most", "6"]
    assert cli.execute(command) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == "largest batch that fits: --set training.batch_size_per_worker=6"
    assert [line.split()[1:3] for line in output if line.startswith("trial ")] == [["6", "samples:"]]
    assert any(line.startswith("estimate  weights ") for line in output)
