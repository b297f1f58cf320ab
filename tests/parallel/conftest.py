"""Trainings whose ranks are killed, and the weights with which they end."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest

from conf.schema import RunConfig
from jobs.train import TrainedRun
from pipelines.training import entry


class Death(NamedTuple):
    """One attempt's end."""

    rank: int
    at: int
    """Before which of its steps in this attempt."""
    while_saving: bool = False
    """Whether it is while the checkpoint after that step is written."""


def training_that_dies(config: RunConfig, run: Any, checkpoints: Path, deaths: Sequence[Death]) -> Any:
    """`entry.train`, but in each of the first attempts the process of one rank is killed at one of its steps."""
    import os
    import signal

    from pipelines.launch.report import attempt
    from pipelines.training.worker import train_worker

    death = deaths[attempt() - 1] if attempt() <= len(deaths) else None
    count = 0

    def die_where_due(_: Any, step: int) -> None:
        nonlocal count
        count += 1
        if death is None or death.rank != int(os.environ["HOROVOD_RANK"]) or count != death.at:
            return
        if death.while_saving:
            np.lib.format.write_array = write_a_part
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_a_part(file: Any, *_: Any, **__: Any) -> None:
        file.write(bytes(100_000))  # more than what Python holds back: the file on the disk has a part of its content
        os.kill(os.getpid(), signal.SIGKILL)

    return train_worker(config, run, checkpoints, before_step=die_where_due)


@pytest.fixture
def let_ranks_die(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets one rank of each of the next training's first attempts die: `let_ranks_die((rank, at, while saving), ...)`.

    `at` counts the rank's steps in that attempt.
    """
    # This module cannot be imported in a worker process: its functions travel as code.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def install(*deaths: tuple[Any, ...]) -> None:
        chosen = [Death(*death) for death in deaths]
        monkeypatch.setattr(entry, "train", lambda *args: training_that_dies(*args, deaths=chosen))

    return install


@pytest.fixture(scope="session")
def weights() -> Callable[[TrainedRun], dict[str, np.ndarray]]:
    """Reads every array of a training's last checkpoint."""

    def read(trained: TrainedRun) -> dict[str, np.ndarray]:
        with np.load(trained.summary.checkpoint) as file:
            return {name: file[name] for name in file.files if name != "state.json"}

    return read
