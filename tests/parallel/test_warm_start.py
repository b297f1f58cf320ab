"""Trainings that begin with weights of another one, or with filters that are made of the dataset."""

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs.prepare import prepare
from jobs.train import TrainedRun, train
from models.networks.whitening import LAYER
from pipelines.dataset.format.manifest import read_manifest
from pipelines.training.setup.rank_setup import begin_whitened
from pipelines.training.setup.recipe import make_model
from tests.parallel.trainings import arrays_of

pytestmark = [
    pytest.mark.spark,
    pytest.mark.parallel,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("mlflow_store"),
]


def config(dataset: Path, output: Path, *settings: str) -> RunConfig:
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", *settings])


def eurosat_archive(shared_data: Path, root: Path) -> Path:
    """The two real patches, sixteen times each."""
    for file in sorted((shared_data / "eurosat" / "EuroSAT_MS").glob("*/*.tif")):
        folder = root / file.parent.name
        folder.mkdir(parents=True)
        for number in range(1, 17):
            shutil.copy(file, folder / f"{folder.name}_{number}.tif")
    return root


def weights(trained: TrainedRun) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint, by the path of its variable."""
    return {name.partition(":")[2]: value for name, value in arrays_of(trained.summary.checkpoint).items()}


def test_eurosat_from_bigearthnet(
    spark: SparkSession,
    small_dataset: Path,
    shared_data: Path,
    mlflow_store: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other bands, other classes, frozen layers."""
    common = ("training.epochs=1", "model={name: resnet_cifar, depth: 8}")
    first = train(config(small_dataset, tmp_path / "first", *common))
    archive = f"archive={{kind: eurosat_ms, root: {eurosat_archive(shared_data, tmp_path / 'EuroSAT_MS')}}}"
    eurosat = tmp_path / "eurosat"
    prepare(config(eurosat, tmp_path, archive))
    capsys.readouterr()
    frozen = "warm_start.frozen_layers=['stem_*', 'stage1_*']"
    for number, source in enumerate((first.summary.model_uri, first.summary.checkpoint)):
        second = train(config(eurosat, tmp_path / str(number), f"warm_start.source={source}", frozen, *common))
        output = capsys.readouterr().out
        assert [
            line
            for line in (
                f"warm start from {source}",
                "stem_conv.kernel: input channels are taken by the names of their bands",
                "logits.kernel starts from random weights: the classes are others",
                "layers are frozen: stage1_block1_bn1, ",
            )
            if line not in output
        ] == []
        before, after = weights(first), weights(second)
        # BigEarthNet has no B10; its order is by resolution, EuroSAT's has B8A at the end.
        eurosats = ["B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B09", "B10", "B11", "B12", "B8A"]
        bigearthnets = ["B02", "B03", "B04", "B08", "B05", "B06", "B07", "B8A", "B11", "B12", "B01", "B09"]
        for place, band in enumerate(bigearthnets):
            np.testing.assert_array_equal(
                after["stem_conv.kernel"][:, :, eurosats.index(band)], before["stem_conv.kernel"][:, :, place]
            )
        for name in ("stage1_block1_conv1.kernel", "stem_bn.moving_mean"):
            np.testing.assert_array_equal(after[name], before[name])
        moved = after["stage3_block1_conv2.kernel"] - before["stage3_block1_conv2.kernel"]
        assert 0 < np.linalg.norm(moved) < np.linalg.norm(before["stage3_block1_conv2.kernel"])
        assert MlflowClient(mlflow_store).get_run(second.run.run_id).data.params["warm_start.source"] == source


def test_whitening_filters_stay_what_the_dataset_made_them(
    spark: SparkSession, small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = "model={name: airbench, width_factor: 0.125}"
    chosen, manifest = config(small_dataset, tmp_path / "first", network), read_manifest(small_dataset)
    keras.utils.set_random_seed(0)
    model = make_model(chosen, manifest)
    line = begin_whitened(model, chosen.dataset.path, chosen.reader, manifest, chosen.input.bands)
    kernel = np.array(getattr(model, "network", model).get_layer(LAYER).kernel)

    first = train(chosen)
    assert line in capsys.readouterr().out
    np.testing.assert_allclose(weights(first)[f"{LAYER}.kernel"], kernel, rtol=1e-4, atol=1e-4)

    # A warm start takes the filters of the source, whatever the new training sees.
    source = f"warm_start.source={first.summary.checkpoint}"
    second = train(config(small_dataset, tmp_path / "second", network, source, "training.epochs=1"))
    np.testing.assert_array_equal(weights(second)[f"{LAYER}.kernel"], weights(first)[f"{LAYER}.kernel"])
