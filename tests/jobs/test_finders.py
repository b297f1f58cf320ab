"""`groundswell find-rate` and `find-batch` as a user meets them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load, shipped_names
from jobs.find_batch import _with_smallest_batch, find_batch
from jobs.find_rate import conclusion, table
from jobs.shell import cli
from jobs.shell.command import Result
from jobs.shell.ranks import ShortageHint
from pipelines.launch.driver.failure import Outcome, RankLostError
from pipelines.training import entry
from pipelines.training.driver.checks import check_dataset
from pipelines.training.finders.batches import FRACTION
from pipelines.training.finders.rates import RangeTest, RatePoint, Suggestion
from pipelines.training.memory.memory import MemoryLimit, Needs, resident_peak
from pipelines.training.ranks.events import MemoryNeeded
from pipelines.training.setup.rates import make_schedule

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
def test_mistakes_are_one_line(arguments: list[str], message: str, error_line: Callable[..., str]) -> None:
    assert message in error_line(arguments[0], "--config", "smoke", *arguments[1:])


MIB = 1 << 20
NEEDS = Needs(weights=100 * MIB, gradients=90 * MIB, optimizer=80 * MIB, exchange=0, sample=10 * MIB)


@pytest.mark.parametrize(("exit_code", "lines"), [(-9, 1), (-11, 0), (None, 0)])
def test_a_killed_rank_has_a_hint_at_memory(
    exit_code: int | None, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RankLostError([Outcome(1, "here", "died", "killed", exit_code)])
    hint = ShortageHint(load("smoke", ["training.batch_size_per_worker=64"]))
    hint.say(error)
    before = (
        "rank 1 was killed; if memory was short, it was so before there was a model: choose a smaller model or more"
    )
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(before)] == [
        f"{before} memory"
    ] * lines
    # 80 % of 500 MiB leave 130 for the batch.
    hint.take(MemoryNeeded(needs=NEEDS, limit=MemoryLimit(500 * MIB, "the host's memory, 500 MiB")))
    hint.say(error)
    text = (
        "rank 1 was killed; if memory was short (the host's memory, 500 MiB): training.batch_size_per_worker=64 "
        "(weights 100.0 MiB, gradients 90.0 MiB, optimizer 80.0 MiB, 10.00 MiB for each sample): lower it to 13, with "
        "training.accumulation_steps or training.global_batch_size for the same global batch, or let `groundswell "
        "find-batch` find the largest that fits"
    )
    assert capsys.readouterr().out.splitlines() == [text] * lines
    hint.take(MemoryNeeded(needs=NEEDS, limit=MemoryLimit(100 * MIB, "x")))
    hint.say(error)
    assert capsys.readouterr().out.count("no smaller batch is estimated to fit: choose a smaller model") == lines


@pytest.mark.parametrize("name", shipped_names())
def test_the_smallest_batch_is_refused_by_nothing(name: str) -> None:
    for settings, size in (([], 1), (["training.mixup=0.2"], 2)):
        config = _with_smallest_batch(load(name, settings))
        assert (config.training.batch_size_per_worker, make_schedule(config, 10)(0)) == (
            size,
            make_schedule(config, 10)(9),
        )


def test_growing_images_do_not_hinder_the_search(small_dataset: Path) -> None:
    """With the smallest batch both places are in the first epoch."""
    schedule = "[{until: {steps: 1}, scale: 0.5}, {until: {steps: 2}, scale: 0.75}]"
    config = load("smoke", [f"dataset.path={small_dataset}", f"input.resolution_schedule={schedule}"])
    assert _with_smallest_batch(config).input.resolution_schedule == []
    check_dataset(_with_smallest_batch(config))


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
    small_network: str,
    mlflow_store: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [
        *("find-rate", "--config", "smoke", "--set", f"dataset.path={small_dataset}", "--steps", "24"),
        *("--set", small_network, "--set", "training.accumulation_steps=2"),
        *("--set", "training.batch_size_per_worker=2"),
        *("--set", "optimizer={name: sgd, learning_rate: 1.0, momentum: 0.9}", "--low", "0.001"),
        *("--high", "1e7"),
    ]
    assert cli.execute([*command, "--plot", "rates.png", "--result", "result.json"]) == 0
    assert "the loss diverged" in capsys.readouterr().out
    assert (folder / "rates.png").read_bytes().startswith(b"\x89PNG")
    result, client = json.loads((folder / "result.json").read_text()), MlflowClient(mlflow_store)
    run = client.get_run(result["run_id"])
    assert (run.info.status, run.data.params["optimizer.name"]) == ("FINISHED", "sgd")
    assert 1 < len(client.get_metric_history(result["run_id"], "range_test/smoothed_loss")) < 24
    assert {item.path for item in client.list_artifacts(result["run_id"])} == {"range_test.png"}
    assert not (folder / "outputs").exists(), "nothing of a training is touched"


@pytest.mark.long
def test_a_batch_is_found(
    spark: SparkSession,
    small_dataset: Path,
    small_network: str,
    mlflow_store: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [
        *("find-batch", "--config", "smoke", "--set", f"dataset.path={small_dataset}", "--at-most", "6"),
        *("--set", small_network),
    ]
    assert cli.execute(command) == 0
    output = capsys.readouterr().out.splitlines()
    assert (output[-1], [line.split()[1:3] for line in output if line.startswith("trial ")]) == (
        "largest batch that fits: --set training.batch_size_per_worker=6",
        [["6", "samples:"]],
    )
    assert any(line.startswith("estimate  weights ") for line in output)


def search_below(config: Any, largest_allowed: int) -> Any:
    """`entry.search_batch` for rows without end, on a worker that may grow by 800 MiB."""
    from pipelines.training.finders import workers  # imports TensorFlow, which the driver does without

    def limit(ranks_on_host: int) -> MemoryLimit:
        return MemoryLimit(int((resident_peak() + (800 << 20)) / FRACTION), "a test's limit")

    workers.memory_limit = limit  # type: ignore[attr-defined]
    return workers.batch_search_worker(config, 4096)


@pytest.mark.long
@pytest.mark.usefixtures("new_interpreters")  # a fork begins with the memory of what it shares
@pytest.mark.parametrize("mode", ["synchronous", "{name: local, every_steps: 8}"])
def test_the_search_ends_below_the_limit(
    mode: str,
    spark: SparkSession,
    small_dataset: Path,
    small_network: str,
    mlflow_store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(entry, "search_batch", search_below)
    modes = [f"training.mode={mode}"] if mode != "synchronous" else []
    search = find_batch(
        load("smoke", [f"dataset.path={small_dataset}", small_network, *modes]), None, Result("find-batch")
    )
    assert search.found is not None
    assert search.found < 4096
    assert len(search.trials) > 1
    assert max(trial.peak for trial in search.trials if trial.fits(search.limit)) <= FRACTION * search.limit.bytes
    # It tried what the limit allows, and not only the smallest batches.
    assert max(trial.peak for trial in search.trials) > FRACTION * search.limit.bytes - (300 << 20)
