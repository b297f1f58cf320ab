"""Small trainings whose ranks die, and the same ones undisturbed, which end with the same bits.

Each undisturbed one is trained once in a run of the tests, also where several processes ask for it.
"""

import fcntl
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
from mlflow import MlflowClient

from conf.load import load
from jobs.train import TrainedRun, train
from pipelines.training import entry

_COMMON = (
    "model={name: resnet_cifar, depth: 2, width_factor: 0.5, dropout: 0.1}",
    "training.epochs=3",
    "training.batch_size_per_worker=3",  # 5 steps of 6 samples
    "training.checkpoint_every_steps=4",
    "input.augmentation=dihedral",
    "launch.exchange_timeout_seconds=300",  # a rank that waits for its spare lets the others wait
)
SETTINGS = {
    "codec": (
        "model={name: resnet_cifar, depth: 8, width_factor: 0.5, dropout: 0.1, stochastic_depth: 0.2}",
        "model.batch_norm_ranks=all",
        "exchange.codec=onebit",
        "exchange.dense_below=0",
    ),
    "local": (
        "training.mode={name: local, every_steps: 4, outer: {momentum: 0.5}}",
        "optimizer={name: sgd, learning_rate: 0.05}",
        "exchange.codec=onebit",
        "exchange.dense_below=0",
    ),
    # 2.8 MB of gradients: a rank dies while they travel.
    "delayed": ("training.mode=delayed", "model={name: resnet_cifar, depth: 8, width_factor: 1.5, dropout: 0.1}"),
    # The first epoch is the best one, since none can be that much better, and training ends after the third.
    "regularised": (
        "training.mode={name: synchronous, shard_optimizer: true}",
        "training.batch_size_per_worker=4",  # 4 steps of 8 samples
        "training.checkpoint_every_steps=3",
        "input.resolution_schedule=[{until: {steps: 4}, scale: 0.5}, {until: {steps: 8}, scale: 0.75}]",
        "training.gradient_clipping=1.0",
        "training.ema=0.75",
        "training.mixup=0.4",
        "training.class_weights=balanced",
        "training.label_smoothing=0.1",
        "training.epochs=5",
        "training.selection={metric: val_ema/loss, min_delta: 1000.0, patience: 2}",
    ),
    "accumulated": (
        "training.accumulation_steps=2",  # 2 steps of 12 samples
        "training.epochs=8",
        "training.ema=0.9",
        "training.precision=float16",
        "exchange.codec=powersgd",
        "exchange.dense_below=0",
    ),
}
"""What the trainings differ in, by name."""
_COMPARED = (
    *("train/step_loss", "train/loss", "val/loss", "val_ema/loss", "val/f1_micro", "train/image_height"),
    *("exchange/payload_bytes", "exchange/payload_bytes_total"),
)


class Death(NamedTuple):
    """The end of one process of a rank, once."""

    rank: int
    step: int
    """Optimizer steps of the training done before."""
    seconds: float = 0.0
    """After the beginning of that step; negative: while the next file of a checkpoint is written."""
    stops: bool = False
    """Whether the process does not end but hangs."""


def arrays_of(checkpoint: str) -> dict[str, np.ndarray]:
    """Every array of a checkpoint."""
    with np.load(checkpoint) as file:
        return {name: file[name] for name in file.files if name != "state.json"}


class Trained(NamedTuple):
    """A training and the store that has its record."""

    run: TrainedRun
    store: str

    def weights(self) -> dict[str, np.ndarray]:
        """Every array of its last checkpoint."""
        return arrays_of(self.run.summary.checkpoint)

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Steps and values of a metric."""
        history = MlflowClient(self.store).get_metric_history(self.run.run.run_id, metric)
        return [(point.step, point.value) for point in history]

    def log(self, rank: int) -> str:
        """The log of a rank."""
        return (Path(self.run.folder) / "logs" / f"rank-{rank}.log").read_text()


Undisturbed = Callable[[str], Trained]
Disturbed = Callable[..., Trained]


def assert_equal(found: Trained, expected: Trained) -> None:
    """Both trainings have ended, with the same bits and the same curves."""
    np.testing.assert_equal(found.weights(), expected.weights())
    assert MlflowClient(found.store).get_run(found.run.run.run_id).info.status == "FINISHED"
    assert {metric: found.points(metric) for metric in _COMPARED} == {
        metric: expected.points(metric) for metric in _COMPARED
    }


def training_that_dies(config: Any, run: Any, checkpoints: Any, *, deaths: Sequence[Death], waits: bool = False) -> Any:
    """`entry.train`, but the processes of ranks are killed, each death once; some wait until their spare is ready."""
    import threading

    from pipelines.launch.rank.membership import is_spare
    from pipelines.training import worker

    own_rank, folder = int(os.environ["HOROVOD_RANK"]), checkpoints.parent.path
    mine = [death for death in deaths if death.rank == own_rank]
    step_ahead = worker.step_ahead  # type: ignore[attr-defined]

    def ready(*args: Any, **settings: Any) -> None:
        step_ahead(*args, **settings)
        (folder / f"ahead-{own_rank}-{os.getpid()}").touch()

    def kill(stops: bool = False) -> None:
        os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)

    def write_a_part(file: Any, *_: Any, **__: Any) -> None:
        file.write(bytes(100_000))  # more than what Python holds back: the file on the disk has a part of its content
        kill()

    def die_where_due(_: Any, step: int) -> None:
        for number, death in enumerate(mine):
            mark = folder / f"death-{own_rank}-{number}"
            if death.step != step or mark.exists() or is_spare():
                continue
            mark.touch()
            while waits and len(list(folder.glob(f"ahead-{own_rank}-*"))) <= number:
                time.sleep(0.1)
            if death.seconds < 0:
                np.lib.format.write_array = write_a_part
            else:
                threading.Timer(death.seconds, kill).start() if death.seconds else kill(death.stops)

    worker.step_ahead = ready  # type: ignore[attr-defined]
    return worker.train_worker(config, run, checkpoints, before_step=die_where_due)


def let_die(patch: pytest.MonkeyPatch, *deaths: tuple[Any, ...], waits: bool = False) -> None:
    """Let ranks of the next trainings die; each of `deaths` has what `Death` has."""
    # This module cannot be imported in a worker process: its functions travel as code.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    chosen = [Death(*death) for death in deaths]
    patch.setattr(entry, "train", lambda *args: training_that_dies(*args, deaths=chosen, waits=waits))


def train_named(
    name: str, dataset: Path, folder: Path, store: str, deaths: Sequence[tuple[Any, ...]], *settings: str, waits: bool
) -> Trained:
    """Train one of `SETTINGS`, while ranks die."""
    fixed = (f"dataset.path={dataset}", f"training.output={folder}", *_COMMON, *SETTINGS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store)
        let_die(patch, *deaths, waits=waits)
        trained = Trained(train(load("smoke", [*fixed, *settings])), store)
    assert len(list(Path(trained.run.folder).glob("death-*"))) == len(deaths)
    return trained


def train_once(name: str, folder: Path, dataset: Path, new_store: Callable[[Path], str]) -> Trained:
    """The undisturbed training of that name, trained where no process of this run of the tests has done it yet."""
    folder.mkdir(exist_ok=True)
    result = folder / "result"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            store = new_store(folder / "mlflow.db")
            result.write_bytes(pickle.dumps(train_named(name, dataset, folder / "out", store, (), waits=False)))
    return pickle.loads(result.read_bytes())
