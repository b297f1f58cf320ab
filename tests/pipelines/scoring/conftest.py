"""What a small model predicts in one process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from pipelines.archives.synthetic import generate_bigearthnet_v2
from pipelines.archives.table import open_archive
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.reader import SplitReader
from pipelines.dataset.writer import prepare_dataset
from pipelines.scoring import job, predictor, write
from pipelines.scoring.model import ModelDescription
from tests.patience import patient


@pytest.fixture
def _use_store(logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)


@pytest.fixture
def _without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are calls, and a model's probabilities of all classes are the mean of its first image group."""

    def load(model: ModelDescription, *_: Any) -> Callable[..., Any]:
        def predict(images: dict[str, Any]) -> Any:
            pixels = images[model.inputs[0].name]
            means = pixels.mean((1, 2, 3))[:, None] / np.iinfo(pixels.dtype).max
            return np.repeat(means, len(model.class_names), 1).astype(np.float32)

        return predict

    def run(spark: object, items: list[Any], function: Callable[[Any], Any], **_: Any) -> list[Any]:
        return [function(item) for item in items]

    monkeypatch.setattr(write, "load_keras", load)
    monkeypatch.setattr(predictor, "_loaded", {})
    monkeypatch.setattr("pipelines.tasks.run_tasks", run)
    monkeypatch.setattr("pipelines.tasks.is_local_mode", lambda spark: True)
    monkeypatch.setattr(job, "is_local_mode", lambda spark: True)
    monkeypatch.setattr(job, "send", lambda spark, file: SimpleNamespace(value=file, destroy=lambda: None))


_PREDICT = """
import sys
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1], compile=False)
images = dict(np.load(sys.argv[2]))
np.save(sys.argv[3], model.predict({name: images[name] for name in model.input}, batch_size=8, verbose=0))
"""


@pytest.fixture(scope="session")
def plain_predictions(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Gives the probabilities that Keras's own `predict` computes in one process, by id; of images left for right."""

    def predict(model: Path, dataset: Path, *, mirrored: bool = False) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("predict")
        manifest: Manifest = read_manifest(dataset)
        ids: list[str] = []
        images: dict[str, list[Any]] = {}
        for split in manifest.splits:
            reader = SplitReader(dataset, split)
            ids += reader.ids()
            for name, pixels in reader.gather(np.arange(len(reader))).images.items():
                images.setdefault(name, []).append(pixels[:, :, ::-1] if mirrored else pixels)
        np.savez(folder / "images.npz", **{name: np.concatenate(pixels) for name, pixels in images.items()})
        command = [sys.executable, "-c", _PREDICT, model, folder / "images.npz", folder / "found.npy"]
        subprocess.run(command, check=True, timeout=patient(200), capture_output=True)
        return dict(zip(ids, np.load(folder / "found.npy"), strict=True))

    return predict


@pytest.fixture(scope="session")
def expected(plain_predictions: Callable[..., dict[str, Any]], logged: Any, small_dataset: Path) -> dict[str, Any]:
    """What Keras alone predicts of the small dataset, by id."""
    return plain_predictions(logged.file, small_dataset)


@pytest.fixture(scope="session")
def labelled(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with enough samples to calibrate on."""
    folder = tmp_path_factory.mktemp("labelled")
    generate_bigearthnet_v2(folder / "BigEarthNet", train=64, validation=24, test=8, seed=5)
    archive = open_archive("bigearthnet_v2", root=str(folder / "BigEarthNet"))
    prepare_dataset(spark, archive, folder / "dataset", row_group_mib=1, row_groups_per_shard=2)
    return folder / "dataset"
