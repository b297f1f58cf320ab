"""The model of a checkpoint, made without training."""

from pathlib import Path

import keras
import numpy as np
import pytest
import yaml
from mlflow import MlflowClient

from conf.load import load
from conf.schema import RunConfig
from jobs.export import export_model
from models.networks.model import inputs_of
from pipelines.dataset.format.manifest import write_manifest
from pipelines.storage.folder import Location
from pipelines.tracking.journal.local_run import Description, LocalRun
from pipelines.tracking.models.model_metadata import ModelMetadata
from pipelines.tracking.models.models import averaged_model_uri, load_model
from pipelines.tracking.store.runs import start_run
from pipelines.training.checkpoint.state import TrainingState, save_checkpoint
from pipelines.training.setup.recipe import freeze_layers, make_model, make_optimizer
from pipelines.training.step.weight_average import WeightAverage
from tests.pipelines.training.manifests import rgb_manifest

pytestmark = pytest.mark.timeout(280)

SMALL = "model={name: resnet_cifar, depth: 8, width_factor: 0.5}"
MANIFEST = rgb_manifest(splits={"train": (8, 8, 16)}, archive="eurosat_rgb", class_names=("water", "land", "town"))


def new_run(output: Path, config: RunConfig) -> Path:
    """The folder of a run of the store, as training leaves it but for its checkpoints."""
    return write_run(output / start_run("export", None, {}, {}).run_id, config)


def write_run(folder: Path, config: RunConfig) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude={"archive", "prepare"})))
    write_manifest(MANIFEST, folder)
    return folder


def write_checkpoint(folder: Path, config: RunConfig, step: int, history: list[dict[str, float]]) -> keras.Model:
    """A checkpoint with weights of its own; the model that it holds."""
    keras.utils.set_random_seed(step)
    model = make_model(config, MANIFEST)
    freeze_layers(config.warm_start, model)
    average = WeightAverage(model, 0.9)
    for variable in average.variables:
        variable.assign(variable * 0.5)
    variables = [*model.variables, *make_optimizer(config.optimizer, model).variables, *average.variables]
    thresholds = {"val": [0.1, 0.2, step / 10], "val_ema": [0.3, 0.4, step / 10]}
    state = TrainingState(len(history), step, 0, 8, folder.name, MANIFEST.fingerprint, history, thresholds=thresholds)
    save_checkpoint(Location.at(folder) / "checkpoints", state, variables, spared=4)
    return model


def answers(model: keras.Model) -> np.ndarray:
    images = {"rgb": np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3)).astype(np.uint8)}
    return np.asarray(model(inputs_of(model, images), training=False))


def assert_exported(uri: str, trained: keras.Model) -> ModelMetadata:
    """The logged model has the probabilities of the trained one; what is said of it."""
    model, description = load_model(uri)
    np.testing.assert_allclose(answers(model), keras.ops.softmax(answers(trained)), rtol=1e-5)
    return description


def assert_averaged(uri: str, trained: keras.Model) -> ModelMetadata:
    """The average of a logged model has other probabilities; what is said of it."""
    averaged, description = load_model(averaged_model_uri(uri))
    assert np.abs(answers(averaged) - keras.ops.softmax(answers(trained))).max() > 1e-3
    return description


def test_the_best_epochs_model_and_its_average_are_made_from_checkpoints(mlflow_store: str, tmp_path: Path) -> None:
    config = load("smoke", [SMALL, "training.selection.metric=val/top_1", "training.ema=0.9"])
    folder = new_run(tmp_path, config)
    best = write_checkpoint(folder, config, 4, [{"val/top_1": 0.9}])
    newest = write_checkpoint(folder, config, 8, [{"val/top_1": 0.9}, {"val/top_1": 0.5}])

    uri = export_model(Location.at(folder))
    assert uri.startswith(f"runs:/{folder.name}/")
    made = assert_exported(uri, best)
    assert (made.class_names, made.archive) == (("water", "land", "town"), "eurosat_rgb")
    averaged = assert_averaged(uri, best)
    assert (made.thresholds, averaged.ema, averaged.thresholds) == ((0.1, 0.2, 0.4), 0.9, (0.3, 0.4, 0.4))

    export_model(Location.at(folder), Location.at(folder) / "checkpoints" / "step-00000008.npz")
    assert_exported(uri, newest)
    models = MlflowClient(mlflow_store).get_run(folder.name).outputs.model_outputs
    assert sorted(each.step for each in models) == [4, 4, 8, 8]


def test_frozen_layers_have_no_average_and_another_dataset_gives_no_example(
    mlflow_store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warm_start, dataset = "warm_start={source: /x.npz, frozen_layers: ['stem*']}", tmp_path / "dataset"
    config = load("smoke", [SMALL, "training.ema=0.9", warm_start, f"dataset.path={dataset}"])
    dataset.mkdir()
    write_manifest(MANIFEST.model_copy(update={"source_fingerprint": "of another archive"}), dataset)
    folder = new_run(tmp_path, config)
    trained, uri = write_checkpoint(folder, config, 4, [{"val/top_1": 0.9}]), export_model(Location.at(folder))
    assert_exported(uri, trained)
    assert_averaged(uri, trained)
    assert "dataset is another dataset than that of the run" in caplog.text


@pytest.mark.long
def test_layers_without_names_are_found_in_every_export_of_a_process(
    mlflow_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nameless.py").write_text(
        "import keras\n\ndef network(images, *, classes, dtype):\n"
        "    return keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(images))\n"
    )
    config = load("smoke", ["model={name: import, path: 'nameless:network'}"])
    for _ in range(2):
        folder = new_run(tmp_path, config)
        keras.backend.clear_session()  # each training has processes of its own
        trained = write_checkpoint(folder, config, 4, [{}])
        assert_exported(export_model(Location.at(folder)), trained)


@pytest.mark.parametrize(
    ("run_id", "checkpoint", "message"),
    [
        ("0123", None, r"there is no run 0123 under .*: give the training\.output"),
        ("4567", None, r"4567 has no config\.yaml, as every run's folder has: train again"),
        ("89", None, "89/checkpoints has 0 checkpoints"),
        ("offline-1", None, r"MLflow does not have run offline-1 yet: `groundswell sync --output"),
        ("89", "checkpoints/damaged.npz", r"damaged\.npz is damaged"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    mlflow_store: str, tmp_path: Path, run_id: str, checkpoint: str | None, message: str
) -> None:
    (tmp_path / "4567").mkdir()
    (write_run(tmp_path / "89", load("smoke")) / "checkpoints" / "damaged.npz").write_bytes(b"damaged")
    LocalRun("offline-1", Description("tests", None, {}, {}), 0, is_stored=False).write(tmp_path / "offline-1")
    run = Location.at(tmp_path / run_id)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        export_model(run, None if checkpoint is None else run / checkpoint)
