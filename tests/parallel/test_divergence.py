"""A training that diverges on any rank, or in the last step of an epoch, says so and keeps the curve up to there."""

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs.train import train
from pipelines.launch.failure import WorkerError
from pipelines.training import entry
from pipelines.training.driver_record import newest_resumable

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(400)]


def training_that_diverges(config: RunConfig, run: Any, checkpoints: Path, spoilt: str, ranks: list[int]) -> Any:
    """`entry.train`, but some ranks have weights that are not finite, before a step or after it."""
    import os

    import numpy as np

    from pipelines.training import parts, worker

    moment, at = spoilt.split()
    make, count = parts.make_train_step, 0  # type: ignore[attr-defined]

    def make_spoilt(model: Any, *args: Any, **kwargs: Any) -> Any:
        step = make(model, *args, **kwargs)

        def spoil(now: str) -> None:
            if (now, count) == (moment, int(at)):
                variable = model.trainable_variables[-1]  # of the head: an activation may hide a NaN
                variable.assign(np.full(variable.shape, np.nan, np.float32))

        def taken(*batch: Any) -> Any:
            nonlocal count
            count += 1
            spoil("before")
            loss = step(*batch)
            spoil("after")
            return loss

        return taken

    if int(os.environ["HOROVOD_RANK"]) in ranks:
        parts.make_train_step = make_spoilt  # type: ignore[attr-defined]
    return worker.train_worker(config, run, checkpoints)


@pytest.mark.parametrize(
    ("spoilt", "ranks", "recover", "text", "known"),
    [
        ("before 7", [1], "restart", r"the loss is nan on rank 1 at step 6|not finite on rank 1 at step 6", 5),
        ("before 7", [1], "in_place", r"the loss is nan on rank 1 at step 6|not finite on rank 1 at step 6", 5),
        ("after 8", [0, 1], "restart", r"probabilities are not finite in validation after step 8: lower the", 8),
    ],
    ids=["one rank", "one rank, in place", "the last step of an epoch"],
)
def test_a_divergence_is_told_as_one_with_the_steps_that_led_to_it(
    spark: SparkSession,
    small_dataset: Path,
    small_network: str,
    tmp_path: Path,
    mlflow_store: str,
    monkeypatch: pytest.MonkeyPatch,
    spoilt: str,
    ranks: list[int],
    recover: str,
    text: str,
    known: int,
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(entry, "train", lambda *args: training_that_diverges(*args, spoilt=spoilt, ranks=ranks))
    settings = [f"dataset.path={small_dataset}", f"training.output={tmp_path}", small_network, "training.epochs=3"]
    config = load("smoke", [*settings, "tracking.experiment=diverging", f"launch.recover={recover}"])
    with pytest.raises(WorkerError, match=text) as raised:
        train(config)
    assert raised.value.root.summary.startswith("FloatingPointError: ")
    assert "step-00000004.npz with training.resume_run=" in str(raised.value)
    client = MlflowClient(mlflow_store)
    run = client.get_run(newest_resumable(config).run_id)
    assert run.data.tags["diverged"] == raised.value.root.summary.splitlines()[0]
    # Four steps are in the checkpoint; the loss of a rank's latest step may not be known yet.
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/step_loss")]
    assert steps[:known] == list(range(known))
