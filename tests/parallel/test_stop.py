"""One rank of a run is asked to stop: all ranks stop after the same step, with a checkpoint."""

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from jobs.train import train
from pipelines.launch.failure import RankLostError
from pipelines.training import entry
from pipelines.training.checkpoint import newest_state

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(500)]


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def training_that_is_asked_to_stop(config: Any, run: Any, checkpoints: Path) -> Any:
    """`entry.train`, but the process of rank 1 receives SIGTERM in its first step."""
    import os
    import signal

    from pipelines.training import worker
    from pipelines.training.step import make_train_step

    make = make_train_step

    def make_asked(*args: Any, **settings: Any) -> Any:
        step, asked = make(*args, **settings), False

        def step_with_signal(*batch: Any) -> Any:
            nonlocal asked
            if not asked and os.environ["HOROVOD_RANK"] == "1":
                asked = True
                os.kill(os.getpid(), signal.SIGTERM)
            return step(*batch)

        return step_with_signal

    setattr(worker, "make_train_step", make_asked)  # noqa: B010
    return worker.train_worker(config, run, checkpoints)


def test_all_ranks_stop_after_the_same_step(
    spark: SparkSession, small_dataset: Path, tmp_path: Path, mlflow_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_epoch = ("training.epochs=1", "schedule.recipe_epochs=1", "schedule.milestones=[]")
    settings = [f"dataset.path={small_dataset}", f"training.output={tmp_path}", *one_epoch]
    monkeypatch.setattr(entry, "train", training_that_is_asked_to_stop)
    # The second step announces it, its sum is read in the third: all ranks stop after that one.
    with pytest.raises(
        RankLostError, match=r"stopped after step 3; continue from .*step-00000003.npz with training.resume_run=\w+"
    ):
        train(load("smoke", settings))
    (folder,) = (path for path in tmp_path.iterdir() if (path / "checkpoints").is_dir())
    assert MlflowClient(mlflow_store).get_run(folder.name).info.status == "KILLED"
    assert newest_state(folder / "checkpoints")[1].is_within_an_epoch
