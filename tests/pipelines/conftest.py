"""A small model as training logs it, without training."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

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


_LOG = """
import json, sys
from dataclasses import replace
import keras, numpy as np
from conf.load import load
from models.networks.model import inputs_of, with_probabilities
from pipelines.dataset.manifest import read_manifest
from pipelines.dataset.reader import SplitReader
from pipelines.tracking.models import log_model
from pipelines.tracking.runs import start_run
from pipelines.training.recipe import make_model
from pipelines.training.description import metadata_of_model

dataset, file, seed, fitted = sys.argv[1:]
config = load("smoke", [f"dataset.path={dataset}"])
manifest = read_manifest(dataset)
keras.utils.set_random_seed(int(seed))
model = with_probabilities(make_model(config, manifest), manifest.task)
random = np.random.default_rng(int(seed))
for layer in model.layers:  # fresh, every block is its shortcut and every class has the same probability
    for weight in layer.weights:
        if weight.path.endswith("gamma"):
            weight.assign(random.uniform(0.3, 0.7, weight.shape))
for weight in model.layers[-2].weights:
    weight.assign(random.normal(0, 1, weight.shape))
if fitted:
    reader = SplitReader(dataset, fitted)
    batch, head = reader.gather(np.arange(len(reader))), model.layers[-2]
    features = np.asarray(keras.Model(model.inputs, head.input)(inputs_of(model, batch.images), training=False))
    weights, *_ = np.linalg.lstsq(np.c_[features, np.ones(len(features))], 12.0 * batch.targets - 6, rcond=None)
    head.set_weights([weights[:-1], weights[-1]])
run = start_run("scoring", None, {}, {})
thresholds = [0.3 + 0.01 * index for index in range(len(manifest.class_names))]
metadata = replace(metadata_of_model(manifest, config), thresholds=tuple(thresholds))
uri = log_model(run, model, metadata, "scored", step=1)
model.save(file)
print(json.dumps(uri))
"""


@pytest.fixture(scope="session")
def log_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Logged]:
    """Logs and registers a model of random weights for a dataset, in a process of its own."""

    def log(dataset: Path, *, store: str | None = None, seed: int = 0, fitted: str = "") -> Logged:
        folder = tmp_path_factory.mktemp("model")
        store = store or f"sqlite:///{folder / 'mlflow.db'}"
        command = [sys.executable, "-c", _LOG, str(dataset), str(folder / "model.keras"), str(seed), fitted]
        environment = {**os.environ, "MLFLOW_TRACKING_URI": store, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=patient(250)
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return Logged(json.loads(done.stdout.splitlines()[-1]), store, folder / "model.keras")

    return log


@pytest.fixture(scope="session")
def logged(log_model: Callable[..., Logged], small_dataset: Path) -> Logged:
    """The model of the small dataset."""
    return log_model(small_dataset)
