"""A training with every regularisation and a best epoch is killed, and ends as one that was never disturbed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs.train import TrainedRun, train
from pipelines.tracking.models import averaged_model_uri, load_model
from pipelines.training.checkpoint_files import list_checkpoints

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


def config(dataset: Path, output: Path, network: str) -> RunConfig:
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", network, *SETTINGS])


def test_a_regularised_training_with_a_best_epoch_goes_on_as_it_was(
    spark: SparkSession,
    small_dataset: Path,
    small_network: str,
    tmp_path: Path,
    mlflow_store: str,
    let_ranks_die: Callable[..., None],
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    expected = train(config(small_dataset, tmp_path / "undisturbed", small_network))

    let_ranks_die((1, 10))  # the second step of the third epoch
    trained = train(config(small_dataset, tmp_path / "killed", small_network))
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
    assert trained.summary.averaged_model_uri == averaged_model_uri(trained.summary.model_uri)
    for uri, ending in ((trained.summary.model_uri, ""), (trained.summary.averaged_model_uri, "_average")):
        model = load_model(uri)[0]
        for layer, names in (("logits", ("kernel", "bias")), ("stem_bn", ("gamma", "moving_mean"))):
            for name in names:
                (value,) = (saved[key] for key in saved if key.endswith(f"{layer}.{name}{ending}"))
                np.testing.assert_array_equal(np.array(getattr(model.get_layer(layer), name)), value)
