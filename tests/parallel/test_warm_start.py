"""EuroSAT is trained from a model of generated BigEarthNet: other bands, other classes, frozen layers."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs.prepare import prepare
from jobs.train import TrainedRun, train
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.state import read_arrays

pytestmark = [
    pytest.mark.spark,
    pytest.mark.parallel,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("mlflow_store"),
]


def config(dataset: Path, output: Path, *settings: str) -> RunConfig:
    common = ("training.epochs=1", "model={name: resnet_cifar, depth: 8}")
    return load("smoke", [f"dataset.path={dataset}", f"training.output={output}", *common, *settings])


def eurosat_archive(shared_data: Path, root: Path) -> Path:
    """The two real patches, sixteen times each."""
    for file in sorted((shared_data / "eurosat" / "EuroSAT_MS").glob("*/*.tif")):
        folder = root / file.parent.name
        folder.mkdir(parents=True)
        for number in range(1, 17):
            shutil.copy(file, folder / f"{folder.name}_{number}.tif")
    return root


def weights(trained: TrainedRun) -> dict[str, np.ndarray]:
    _, arrays = read_arrays(Location(trained.summary.checkpoint))
    return {name.partition(":")[2]: value for name, value in arrays.items()}


@pytest.mark.long
def test_eurosat_from_bigearthnet(
    spark: SparkSession,
    small_dataset: Path,
    shared_data: Path,
    mlflow_store: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = train(config(small_dataset, tmp_path / "first"))
    archive = f"archive={{kind: eurosat_ms, root: {eurosat_archive(shared_data, tmp_path / 'EuroSAT_MS')}}}"
    eurosat = tmp_path / "eurosat"
    prepare(config(eurosat, tmp_path, archive))
    capsys.readouterr()
    frozen = "warm_start.frozen_layers=['stem_*', 'stage1_*']"
    for number, source in enumerate((first.summary.model_uri, first.summary.checkpoint)):
        second = train(config(eurosat, tmp_path / str(number), f"warm_start.source={source}", frozen))
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
