"""Two ranks train behind a whitening convolution whose filters are those of the dataset from the start to the end."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs.train import TrainedRun, train
from models.networks.whitening import LAYER
from pipelines.dataset.format.manifest import read_manifest
from pipelines.training.setup.recipe import make_model
from pipelines.training.setup.whitening import begin_whitened

pytestmark = [
    pytest.mark.spark,
    pytest.mark.parallel,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("mlflow_store"),
]


def config(dataset: Path, output: Path, *settings: str) -> RunConfig:
    network = "model={name: airbench, width_factor: 0.125}"
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", network, *settings])


def filters(arrays: dict[str, np.ndarray]) -> np.ndarray:
    (found,) = (value for name, value in arrays.items() if name.endswith(f":{LAYER}.kernel"))
    return found


def test_the_filters_stay_what_the_dataset_made_them(
    spark: SparkSession,
    small_dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    chosen, manifest = config(small_dataset, tmp_path / "first"), read_manifest(small_dataset)
    keras.utils.set_random_seed(0)
    model = make_model(chosen, manifest)
    line = begin_whitened(model, chosen.dataset.path, chosen.reader, manifest, chosen.input.bands)
    kernel = np.array(getattr(model, "network", model).get_layer(LAYER).kernel)

    first = train(chosen)
    assert line in capsys.readouterr().out
    np.testing.assert_allclose(filters(weights(first)), kernel, rtol=1e-4, atol=1e-4)

    # A warm start takes the filters of the source, whatever the new training sees.
    source = f"warm_start.source={first.summary.checkpoint}"
    second = train(config(small_dataset, tmp_path / "second", source, "training.epochs=1"))
    np.testing.assert_array_equal(filters(weights(second)), filters(weights(first)))
