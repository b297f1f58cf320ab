"""Processes of ranks are killed; spares take over, and the run ends as one that was never disturbed, bit for bit."""

import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from jobs.train import TrainedRun, train
from pipelines.training import entry

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("GROUNDSWELL_KILLS", "4"))
EPOCHS, STEPS = 3 + (KILLS - 4) // 2, 5  # of 6 samples
PAYLOADS = ("exchange/payload_bytes", "exchange/payload_bytes_total")
Undisturbed = Callable[[Sequence[str]], TrainedRun]
Death = tuple[int, int, float]
"""Rank, optimizer steps done before, and seconds after the beginning of that step; negative: in the checkpoint."""


def training_that_dies(config: Any, run: Any, checkpoints: Path, *, deaths: Sequence[Death], waits: bool) -> Any:
    """`entry.train`, but the processes of ranks are killed, each death once; some wait until their spare is ready."""
    import os
    import signal
    import threading
    import time

    from pipelines.launch.membership import is_spare
    from pipelines.training import worker

    own_rank, folder = int(os.environ["HOROVOD_RANK"]), checkpoints.parent
    mine = [death for death in deaths if death[0] == own_rank]
    step_ahead = worker.step_ahead  # type: ignore[attr-defined]

    def ready(*args: Any, **settings: Any) -> None:
        step_ahead(*args, **settings)
        (folder / f"ahead-{own_rank}-{os.getpid()}").touch()

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_where_due(_: Any, step: int) -> None:
        for number, (rank, at, seconds) in enumerate(mine):
            mark = folder / f"death-{rank}-{number}"
            if at == step and not mark.exists() and not is_spare():
                mark.touch()
                while waits and len(list(folder.glob(f"ahead-{rank}-*"))) <= number:
                    time.sleep(0.1)
                if seconds < 0:
                    np.lib.format.write_array = kill  # the next array of a checkpoint
                else:
                    threading.Timer(seconds, kill).start() if seconds else kill()

    worker.step_ahead = ready  # type: ignore[attr-defined]
    return worker.train_worker(config, run, checkpoints, before_step=die_where_due)


def trained(dataset: Path, folder: Path, deaths: Sequence[Death], *settings: str, waits: bool = False) -> TrainedRun:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def dying(*args: Any) -> Any:
        return training_that_dies(*args, deaths=deaths, waits=waits)

    fixed = (
        # A small network, but where the gradients are delayed: there 2.8 MB of them travel.
        "model={name: resnet_cifar, depth: 2, width_factor: 0.5, dropout: 0.1}",
        f"dataset.path={dataset}",
        f"training.output={folder}",
        f"training.epochs={EPOCHS}",
        "training.batch_size_per_worker=3",
        "training.checkpoint_every_steps=4",
        "input.augmentation=dihedral",
        "launch.recover=in_place",
        "launch.exchange_timeout_seconds=300",  # a rank that waits for its spare lets the others wait
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(entry, "train", dying)
    try:
        return train(load("smoke", [*fixed, *settings]))
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def undisturbed(spark: SparkSession, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Trains with some settings and no death, once for all tests of this module."""
    trained_with: dict[tuple[str, ...], TrainedRun] = {}

    def train_once(settings: Sequence[str]) -> TrainedRun:
        key = tuple(settings)
        if key not in trained_with:
            trained_with[key] = trained(small_dataset, tmp_path_factory.mktemp("undisturbed"), (), *key)
        return trained_with[key]

    return train_once


def check_equal(
    run: TrainedRun, expected: TrainedRun, store: str, weights: Callable[[TrainedRun], dict[str, np.ndarray]]
) -> None:
    found, wanted = weights(run), weights(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    client = MlflowClient(store)
    tracked = client.get_run(run.run.run_id)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags["attempt"] == "1"
    for metric in ("train/step_loss", "train/loss", "val/loss", "val/f1_micro", *PAYLOADS):
        points, all_points = (
            [(point.step, point.value) for point in client.get_metric_history(each.run.run_id, metric)]
            for each in (run, expected)
        )
        assert points == all_points, metric


@pytest.mark.long
def test_kills_at_random_moments_cost_no_bit_and_no_attempt(
    undisturbed: Undisturbed,
    small_dataset: Path,
    tmp_path: Path,
    module_mlflow_store: str,
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    """Also what a codec left behind, and the curves of the steps."""
    settings = ("exchange.codec=onebit", "exchange.dense_below=0")
    expected = undisturbed(settings)
    random_ = random.Random(KILLS)
    # Apart from each other, so that a process lives until its own death.
    steps = random_.sample(range(6, EPOCHS * STEPS - 1, 2), KILLS - 1)
    deaths = [(random_.randrange(2), step, random_.choice([0.0, 0.02, 0.05])) for step in steps]
    disturbed = trained(small_dataset, tmp_path / "disturbed", [*deaths, (0, 3, -1.0)], *settings)
    marks = list((disturbed.folder).glob("death-*"))
    assert len(marks) == KILLS
    check_equal(disturbed, expected, module_mlflow_store, weights)
    log = "".join((disturbed.folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(2))
    assert len(re.findall(r"takes the place of one that has died", log)) == KILLS
    tags = MlflowClient(module_mlflow_store).get_run(disturbed.run.run_id).data.tags
    recovered = [value for name, value in tags.items() if name.startswith("recovered_after_step_")]
    assert sorted(recovered) == sorted(f"rank {rank}" for rank, *_ in [*deaths, (0, 3, -1.0)])


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        ["training.mode={name: local, every_steps: 4, outer: {momentum: 0.5}}"],
        ["training.mode=delayed", "model={name: resnet_cifar, depth: 8, width_factor: 1.5, dropout: 0.1}"],
        ["input.resolution_schedule=[{until: {steps: 5}, scale: 0.5}, {until: {steps: 10}, scale: 0.75}]"],
        ["training.mode={name: synchronous, shard_optimizer: true}"],
        [
            *("training.accumulation_steps=2", "training.epochs=8", "training.ema=0.9"),
            *("training.precision=float16", "exchange.codec=powersgd", "exchange.dense_below=0"),
        ],
    ],
)
def test_ranks_continue_in_place_in_every_mode(
    undisturbed: Undisturbed,
    small_dataset: Path,
    tmp_path: Path,
    module_mlflow_store: str,
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
    settings: list[str],
) -> None:
    """One dies alone between two exchanges, one in an exchange; in one mode the gradients have 2.8 MB.

    Each spare has taken a step of its own, of which nothing is left.
    """
    expected = undisturbed(settings)
    deaths = [(1, 6, 0.0), (0, 11, 0.03), (1, 13, 0.0)]
    disturbed = trained(small_dataset, tmp_path / "disturbed", deaths, *settings, waits=True)
    assert len(list(disturbed.folder.glob("death-*"))) == 3
    # A spare alone gets all means, where the graph of a sharded optimizer takes the part of one of two ranks.
    taken = "took a part of a step ahead" if "shard_optimizer" in settings[0] else "took a step ahead ("
    for rank, count in enumerate((1, 2)):
        log = (disturbed.folder / "logs" / f"rank-{rank}.log").read_text()
        assert log.count(taken) >= count
    check_equal(disturbed, expected, module_mlflow_store, weights)


@pytest.mark.long
def test_ranks_of_one_block_agree_whether_an_epoch_begins(
    undisturbed: Undisturbed,
    small_dataset: Path,
    tmp_path: Path,
    module_mlflow_store: str,
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    """One dies in the first step behind a border, while the other one trains on alone until the next border."""
    settings = ["training.mode={name: local, every_steps: 4, outer: {momentum: 0.5}}"]
    expected = undisturbed(settings)
    deaths = [(1, 0, 0.0), (1, 5, 0.0)]
    disturbed = trained(small_dataset, tmp_path / "disturbed", deaths, *settings, waits=True)
    assert len(list(disturbed.folder.glob("death-*"))) == 2
    check_equal(disturbed, expected, module_mlflow_store, weights)


@pytest.mark.long
def test_everything_that_a_rank_holds_is_kept(
    undisturbed: Undisturbed,
    small_dataset: Path,
    tmp_path: Path,
    module_mlflow_store: str,
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    """Sums of micro-batches are forgotten, averages of weights are kept; several steps may be taken again."""
    settings = (
        "training.accumulation_steps=2",
        "training.ema=0.9",
        "training.precision=float16",
        "model.batch_norm_ranks=all",
        "launch.recover_every_steps=3",
    )
    expected = undisturbed(settings)
    disturbed = trained(small_dataset, tmp_path / "disturbed", [(1, 4, 0.0), (0, 5, 0.05)], *settings)
    check_equal(disturbed, expected, module_mlflow_store, weights)
