"""A rank is killed at some step; the run goes on by itself and ends with the weights of one never disturbed."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from conf.load import load
from conf.schema import RunConfig
from jobs.train import TrainedRun, train

pytestmark = [
    pytest.mark.spark,
    pytest.mark.parallel,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("spark"),
]

LetRanksDie = Callable[..., None]
Weights = Callable[[TrainedRun], dict[str, np.ndarray]]


@pytest.fixture(autouse=True)
def _store(mlflow_store: str) -> str:
    return mlflow_store


def config(dataset: Path, output: Path, *settings: str) -> RunConfig:
    """Two epochs of 32 samples, 8 a step."""
    fixed = ("training.checkpoint_every_steps=1", "launch.retries=1", "input.augmentation=dihedral")
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", *fixed, *settings])


@pytest.mark.usefixtures("new_interpreters")
def test_killed_ranks_cost_no_bit(
    small_dataset: Path,
    tmp_path: Path,
    mlflow_store: str,
    let_ranks_die: LetRanksDie,
    weights: Weights,
    capsys: pytest.CaptureFixture[str],
) -> None:
    random = ("model={name: resnet_cifar, depth: 8, width_factor: 0.5, dropout: 0.1, stochastic_depth: 0.2}",)
    expected_run = train(config(small_dataset, tmp_path / "undisturbed", *random))
    undisturbed = weights(expected_run)
    capsys.readouterr()
    deaths = [
        (1, 1, False),  # before any checkpoint
        (0, 4, True),  # while the checkpoint at the end of the first epoch is written: three steps have theirs
        (1, 4, False),  # in the middle of the second epoch, before step 7
    ]
    let_ranks_die(*deaths)
    trained = train(config(small_dataset, tmp_path / "killed", *random, f"launch.retries={len(deaths)}"))
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
    assert re.findall(r"step-0000000(\d)\.npz: epoch (\d)", log) == [("3", "1"), ("6", "2")]
    found = weights(trained)
    assert found.keys() == undisturbed.keys()
    for name, expected in undisturbed.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    payloads = [[row["exchange/payload_bytes_total"] for row in run.summary.history] for run in (trained, expected_run)]
    assert payloads[0] == payloads[1]
    assert len(payloads[0]) == 2
    assert not [path for path in (trained.folder / "checkpoints").iterdir() if path.name.startswith(".")]


def test_what_a_codec_left_behind_is_not_lost(
    small_dataset: Path,
    small_network: str,
    tmp_path: Path,
    mlflow_store: str,
    let_ranks_die: LetRanksDie,
    weights: Weights,
) -> None:
    micro_batches = ("training.accumulation_steps=2", "training.batch_size_per_worker=2")
    codec = ("exchange.codec=onebit", "exchange.dense_below=0")
    settings = (small_network, *codec, "training.epochs=1", *micro_batches)
    expected = weights(train(config(small_dataset, tmp_path / "undisturbed", *settings)))
    let_ranks_die((1, 3))
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
    assert chosen.smaller_sizes() == [1, 2, 3]
    chosen = config(tmp_path, tmp_path, "launch.num_workers=6", "training.global_batch_size=240")
    assert chosen.smaller_sizes() == [1, 2, 3, 4, 5]  # 60, 30, 20, 15 and 12 micro-batches of 4
