"""A small model as training logs it, without training."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

from tests.patience import patient


@dataclass(frozen=True)
class Logged:
    """A logged model."""

    uri: str
    """`runs:/...`"""
    store: str
    """Of MLflow."""
    file: Path
    """Its `.keras` file."""
    head: list[Any]
    """Kernel and bias of its last layer."""
    expected: dict[str, Any]
    """Probabilities that Keras's own `predict` computes of the dataset in one process, by id."""
    mirrored: dict[str, Any]
    """Those of the images with left for right."""

    @property
    def run_id(self) -> str:
        """The run that has logged it."""
        return self.uri.split("/")[1]

    @property
    def client(self) -> MlflowClient:
        """A client of its store."""
        return MlflowClient(self.store)


_LOG = """
import json, sys
from dataclasses import replace
import keras, numpy as np
from conf.load import load
from models.networks.model import with_probabilities
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import SplitReader
from pipelines.tracking.models.models import log_model
from pipelines.tracking.store.runs import start_run
from pipelines.training.setup.recipe import make_model
from pipelines.training.setup.description import metadata_of_model

dataset, folder, network = sys.argv[1:]
config = load("smoke", [f"dataset.path={dataset}", network])
manifest = read_manifest(dataset)
keras.utils.set_random_seed(0)
model = with_probabilities(make_model(config, manifest), manifest.task)
random = np.random.default_rng(0)
gammas = [weight for layer in model.layers for weight in layer.weights if weight.path.endswith("gamma")]
if not all(np.any(weight) for weight in gammas):  # fresh, every residual block is its shortcut
    for weight in gammas:
        weight.assign(random.uniform(0.3, 0.7, weight.shape))
head = model.layers[-2].weights
for weight in head:  # fresh, every class has the same probability
    weight.assign(random.normal(0, 1, weight.shape))
run = start_run("scoring", None, {}, {})
thresholds = [0.3 + 0.01 * index for index in range(len(manifest.class_names))]
metadata = metadata_of_model(manifest, config.input.bands, config.model)
metadata = replace(metadata, thresholds=tuple(thresholds))
uri = log_model(run, model, metadata, "scored", step=1)
model.save(f"{folder}/model.keras")

# What Keras alone predicts with the file, in one process: of every image, and of those with left for right.
model = keras.saving.load_model(f"{folder}/model.keras", compile=False)
readers = [SplitReader(dataset, split) for split in manifest.splits]
found = [reader.gather(np.arange(len(reader))).images for reader in readers]
images = {name: np.concatenate([each[name] for each in found]) for name in model.input}
mirrored = {name: pixels[:, :, ::-1] for name, pixels in images.items()}
predicted = (model.predict(each, batch_size=8, verbose=0) for each in (images, mirrored))
np.savez(f"{folder}/predictions.npz", sum((reader.ids() for reader in readers), []), *predicted, *head)
print(json.dumps(uri))
"""


@pytest.fixture(scope="session")
def log_model(
    tmp_path_factory: pytest.TempPathFactory, small_network: str, new_store: Callable[[Path], str]
) -> Callable[..., Logged]:
    """Logs and registers a model of random weights for a dataset, in a process of its own."""

    def log(dataset: Path, network: str = small_network) -> Logged:
        folder = tmp_path_factory.mktemp("model")
        store = new_store(folder / "mlflow.db")
        command = [sys.executable, "-c", _LOG, str(dataset), str(folder), network]
        environment = {**os.environ, "MLFLOW_TRACKING_URI": store, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=patient(250)
        )
        assert done.returncode == 0, done.stderr[-4000:]
        with np.load(folder / "predictions.npz") as file:
            ids, plain, mirrored, *head = file.values()
        predictions = (dict(zip(ids.tolist(), values, strict=True)) for values in (plain, mirrored))
        return Logged(json.loads(done.stdout.splitlines()[-1]), store, folder / "model.keras", head, *predictions)

    return log


@pytest.fixture(scope="session")
def logged(log_model: Callable[..., Logged], small_dataset: Path) -> Logged:
    """The model of the small dataset."""
    return log_model(small_dataset)


@pytest.fixture
def _use_store(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
