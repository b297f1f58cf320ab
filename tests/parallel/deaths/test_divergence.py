"""A training that diverges on any rank, or in the last step of an epoch, says so and keeps the curve up to there."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from mlflow import MlflowClient

from conf.schema import RunConfig
from jobs.train import TrainedRun
from pipelines.launch.driver.failure import WorkerError
from pipelines.training import entry

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(400)]


def training_that_diverges(config: RunConfig, run: Any, checkpoints: Any) -> Any:
    """`entry.train`, but rank 1 has weights that are not finite before its seventh step."""
    import os

    import numpy as np

    from pipelines.training.worker import train_worker

    def spoil(rank: Any, step: int) -> None:
        if step == 6 and os.environ["HOROVOD_RANK"] == "1":
            variable = rank.setup.model.trainable_variables[-1]  # of the head: an activation may hide a NaN
            variable.assign(np.full(variable.shape, np.nan, np.float32))

    return train_worker(config, run, checkpoints, before_step=spoil)


LAST_STEP = "schedule.decay={name: multi_step, milestones: [{epochs: 1.75, factor: 1.0e+38}]}"


@pytest.mark.parametrize(
    ("settings", "text", "known"),
    [
        (["launch.recover=restart"], r"the loss is nan on rank 1 at step 6|not finite on rank 1 at step 6", 5),
        (["launch.recover=in_place"], r"the loss is nan on rank 1 at step 6|not finite on rank 1 at step 6", 5),
        # Its loss is finite, the weights after it are not.
        (
            [LAST_STEP, "training.epochs=2", "optimizer={name: sgd, learning_rate: 10.0}"],
            r"probabilities are not finite in validation after step 8: lower the",
            8,
        ),
    ],
    ids=["one rank", "one rank, in place", "the last step of an epoch"],
)
def test_a_divergence_is_told_as_one_with_the_steps_that_led_to_it(
    train_small: Callable[..., TrainedRun],
    tmp_path: Path,
    mlflow_store: str,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    text: str,
    known: int,
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    if LAST_STEP not in settings:
        monkeypatch.setattr(entry, "train", training_that_diverges)
    with pytest.raises(WorkerError, match=text) as raised:
        train_small("training.epochs=3", *settings)
    assert raised.value.root.summary.startswith("FloatingPointError: ")
    assert "step-00000004.npz with training.resume_run=" in str(raised.value)
    client = MlflowClient(mlflow_store)
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    run = client.get_run(folder.name)
    assert run.data.tags["diverged"] == raised.value.root.summary.splitlines()[0]
    # Four steps are in the checkpoint; the loss of a rank's latest step may not be known yet.
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/step_loss")]
    assert steps[:known] == list(range(known))
