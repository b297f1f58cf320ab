"""A training with every regularisation and a best epoch is killed, and ends as one that was never disturbed."""

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs.train import TrainedRun, train
from pipelines.tracking.models import load_model
from pipelines.training import entry
from pipelines.training.checkpoint import list_checkpoints

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

SETTINGS = (
    "training.checkpoint_every_steps=1",
    "launch.retries=1",
    "input.augmentation=dihedral",
    "training.gradient_clipping=1.0",
    "training.ema=0.75",
    "training.mixup=0.4",
    "training.class_weights=balanced",
    "training.label_smoothing=0.1",
    "training.epochs=5",
    # No epoch can be that much better: the first one is the best, and training ends after the third.
    "training.selection={metric: val_ema/loss, min_delta: 1000.0, patience: 2}",
)


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def config(dataset: Path, output: Path) -> RunConfig:
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", *SETTINGS])


def weights(trained: TrainedRun) -> dict[str, np.ndarray]:
    with np.load(trained.summary.checkpoint) as file:
        return {name: file[name] for name in file.files if name != "state.json"}


def training_that_dies(config: RunConfig, run: Any, checkpoints: Path) -> Any:
    """`entry.train`, but in the first attempt the process of rank 1 is killed at the second step of the third epoch."""
    import os
    import signal

    from pipelines.launch.report import attempt
    from pipelines.training import worker
    from pipelines.training.step import make_train_step

    def make_dying(*args: Any, **settings: Any) -> Any:
        step, count = make_train_step(*args, **settings), 0

        def dying(*batch: Any) -> Any:
            nonlocal count
            count += 1
            if count == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*batch)

        return dying

    if attempt() == 1 and os.environ["HOROVOD_RANK"] == "1":
        setattr(worker, "make_train_step", make_dying)  # noqa: B010
    return worker.train_worker(config, run, checkpoints)


def test_a_regularised_training_with_a_best_epoch_goes_on_as_it_was(
    spark: SparkSession, small_dataset: Path, tmp_path: Path, mlflow_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(config(small_dataset, tmp_path / "undisturbed"))

    monkeypatch.setattr(entry, "train", training_that_dies)
    trained = train(config(small_dataset, tmp_path / "killed"))
    client = MlflowClient(mlflow_store)
    tags = client.get_run(trained.run.run_id).data.tags
    assert tags["attempt"] == "2"
    found = weights(trained)
    for name, value in weights(expected).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert trained.summary.ended == "after 3 of 5 epochs: 2 in a row without a better val_ema/loss"
    assert (tags["training_ended"], tags["best_epoch"]) == (trained.summary.ended, "1")
    assert tags["best_value"] == f"{trained.summary.history[0]['val_ema/loss']:.6g}"
    for one, other in zip(trained.summary.history, expected.summary.history, strict=True):
        for name in ("train/loss", "val/loss", "val_ema/loss"):
            assert one[name] == other[name], name
        assert one["val/loss"] != one["val_ema/loss"]
    # The checkpoint of the best epoch is there beside the newest two, and both models are those of this epoch.
    folder = trained.folder / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == [f"step-{step:08d}.npz" for step in (4, 11, 12)]
    assert trained.summary.model_epoch == 1
    with np.load(folder / "step-00000004.npz") as file:
        saved = {name.partition(":")[2]: file[name] for name in file.files}
    assert trained.summary.averaged_model_uri == f"runs:/{trained.run.run_id}/model_ema"
    for uri, ending in ((trained.summary.model_uri, ""), (trained.summary.averaged_model_uri, "_average")):
        model = load_model(uri)[0]
        for layer, names in (("logits", ("kernel", "bias")), ("stem_bn", ("gamma", "moving_mean"))):
            for name in names:
                (value,) = (saved[key] for key in saved if key.endswith(f"{layer}.{name}{ending}"))
                np.testing.assert_array_equal(np.array(getattr(model.get_layer(layer), name)), value)
