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
    from pipelines.training import checkpoint_files, parts, worker

    death = deaths[attempt() - 1] if attempt() <= len(deaths) else None
    if death is not None and int(os.environ["HOROVOD_RANK"]) == death.rank:
        make, count = parts.make_train_step, 0  # type: ignore[attr-defined]

        def kill(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def count_step() -> None:
            nonlocal count
            count += 1
            if count == death.at and not death.while_saving:
                kill()
            if count == death.at:
                # The file is open and has a part of its content.
                checkpoint_files._write_arrays = lambda file, arrays: (file.write(b"PK" * 1000), file.flush(), kill())

        def make_dying(*args: Any, **kwargs: Any) -> Any:
            step = make(*args, **kwargs)

            def dying(*batch: Any) -> Any:
                count_step()
                return step(*batch)

            return dying

        def dying_class(step_class: Any) -> Any:
            class Dying(step_class):  # type: ignore[misc]
                def __call__(self, *batch: Any) -> Any:
                    count_step()
                    return super().__call__(*batch)

            return Dying

        parts.make_train_step = make_dying  # type: ignore[attr-defined]
        parts.Pipeline = dying_class(parts.Pipeline)  # type: ignore[attr-defined, misc]
        parts.ServerStep = dying_class(parts.ServerStep)  # type: ignore[attr-defined, misc]
    return worker.train_worker(config, run, checkpoints)


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
