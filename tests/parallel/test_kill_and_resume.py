"""A rank is killed at some step; the run goes on by itself and ends with the weights of one never disturbed."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs import train as train_job
from jobs.train import TrainedRun, train
from pipelines.training import entry

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(900)]

Death = tuple[int, int, bool]
"""Rank, which of its steps in this attempt, and whether it is while the checkpoint after that step is written."""
STEPS = 8  # 2 epochs of 32 samples, 8 a step


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def _store(mlflow_store: str) -> str:
    return mlflow_store


def config(dataset: Path, output: Path, *settings: str) -> RunConfig:
    fixed = (
        "training.checkpoint_every_steps=1",
        "launch.retries=1",
        "input.augmentation=dihedral",
        "model.dropout=0.1",
        "model.stochastic_depth=0.2",
    )
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", *fixed, *settings])


@pytest.fixture(scope="module")
def undisturbed(
    spark: SparkSession, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("undisturbed")
    before = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    try:
        return weights(train(config(small_dataset, folder)))
    finally:
        os.environ.pop("MLFLOW_TRACKING_URI")
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


def weights(trained: TrainedRun) -> dict[str, np.ndarray]:
    with np.load(trained.summary.checkpoint) as file:
        return {name: file[name] for name in file.files if name != "state.json"}


def training_that_dies(config: RunConfig, run: Any, checkpoints: Path, *, deaths: Sequence[Death]) -> Any:
    """`entry.train`, but in each of the first attempts the process of one rank is killed at one of its steps."""
    import os
    import signal

    from pipelines.launch.report import attempt
    from pipelines.training import checkpoint, worker

    rank, at, while_saving = deaths[attempt() - 1] if attempt() <= len(deaths) else (-1, 0, False)
    if int(os.environ["HOROVOD_RANK"]) == rank:
        make, count = worker.make_train_step, 0  # type: ignore[attr-defined]

        def kill(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def make_dying(*args: Any, **kwargs: Any) -> Any:
            step = make(*args, **kwargs)

            def dying(*batch: Any) -> Any:
                nonlocal count
                count += 1
                if count == at and not while_saving:
                    kill()
                if count == at:
                    # The file is open and has a part of its content.
                    checkpoint._write_arrays = lambda file, arrays: (file.write(b"PK" * 1000), file.flush(), kill())
                return step(*batch)

            return dying

        worker.make_train_step = make_dying  # type: ignore[attr-defined]
    return worker.train_worker(config, run, checkpoints)


def test_killed_ranks_cost_no_bit(
    small_dataset: Path,
    tmp_path: Path,
    mlflow_store: str,
    undisturbed: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deaths = [
        (1, 1, False),  # before any checkpoint
        (0, 3, False),  # in the middle of the first epoch: two steps have checkpoints
        (0, 2, True),  # while the checkpoint at the end of the epoch is written
        (1, 3, False),  # in the second epoch
    ]

    def dying(*args: Any) -> Any:
        return training_that_dies(*args, deaths=deaths)

    monkeypatch.setattr(entry, "train", dying)
    trained = train(config(small_dataset, tmp_path, f"launch.retries={len(deaths)}"))
    run = MlflowClient(mlflow_store).get_run(trained.run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["attempt"] == str(len(deaths) + 1)
    shown = capsys.readouterr().out
    for number, (rank, _, _) in enumerate(deaths, start=2):
        reason = run.data.tags[f"attempt_{number}_after"]
        assert f"rank {rank}" in reason
        assert signal.SIGKILL.name in reason
        assert f"attempt {number} after: " in shown
    assert shown.count("starting 2 workers") == len(deaths) + 1
    log = (trained.folder / "logs" / "rank-0.log").read_text()
    assert re.findall(r"step-0000000(\d)\.npz: epoch", log) == ["2", "3", "5"]
    found = weights(trained)
    assert found.keys() == undisturbed.keys()
    for name, expected in undisturbed.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    assert len(trained.summary.history) == 2
    assert not [path for path in (trained.folder / "checkpoints").iterdir() if path.name.startswith(".")]


def test_what_a_codec_left_behind_is_not_lost(
    small_dataset: Path,
    tmp_path: Path,
    mlflow_store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    micro_batches = ("training.accumulation_steps=2", "training.batch_size_per_worker=2")
    settings = ("exchange.codec=onebit", "training.epochs=1", *micro_batches)
    expected = weights(train(config(small_dataset, tmp_path / "undisturbed", *settings)))

    def dying(*args: Any) -> Any:
        return training_that_dies(*args, deaths=[(1, 3, False)])

    monkeypatch.setattr(entry, "train", dying)
    trained = train(config(small_dataset, tmp_path / "killed", *settings))
    found = weights(trained)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    states = sorted(path.name for path in (trained.folder / "checkpoints").glob("*.rank-*"))
    # Two checkpoints are kept, each with the state of two ranks.
    assert states == [f"step-{step:08d}.rank-{rank:05d}.npz" for step in (3, 4) for rank in (0, 1)]
    first, second = (np.load(trained.folder / "checkpoints" / name) for name in states[:2])
    residual = next(name for name in first.files if name.startswith("residual/"))
    assert (first[residual] != second[residual]).any()
    ratios = MlflowClient(mlflow_store).get_metric_history(trained.run.run_id, "exchange/compression_ratio")
    assert [(metric.step, metric.value > 2) for metric in ratios] == [(step, True) for step in range(4)]


def test_the_sizes_of_a_further_attempt_make_up_the_global_batch_from_the_same_batches(tmp_path: Path) -> None:
    chosen = config(tmp_path, tmp_path, "launch.num_workers=6", "training.batch_size_per_worker=4")
    assert train_job._smaller_sizes(chosen) == [1, 2, 3]
    chosen = config(tmp_path, tmp_path, "launch.num_workers=6", "training.global_batch_size=240")
    assert train_job._smaller_sizes(chosen) == [1, 2, 3, 4, 5]  # 60, 30, 20, 15 and 12 micro-batches of 4
