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
from pipelines.dataset.manifest import BandStatistics, Manifest, Shard, Split, write_manifest
from pipelines.sample import ImageGroup
from pipelines.tracking.local_run import Description, LocalRun
from pipelines.tracking.models import averaged_model_uri, load_model
from pipelines.tracking.runs import start_run
from pipelines.training.checkpoint import TrainingState, save_checkpoint
from pipelines.training.recipe import freeze_layers, make_model, make_optimizer
from pipelines.training.weight_average import WeightAverage

pytestmark = pytest.mark.timeout(280)

MANIFEST = Manifest(
    archive="eurosat_rgb",
    task="single_label",
    class_names=("water", "land", "town"),
    groups=(ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),),
    splits={"train": Split(shards=(Shard(file="train/a.parquet", row_groups=(32,), size=1),), class_counts=(8, 8, 16))},
    statistics={"rgb": BandStatistics(mean=(90.0, 90.0, 90.0), std=(40.0, 40.0, 40.0))},
    settings={},
    source_fingerprint="abc",
)


def write_run(folder: Path, config: RunConfig) -> None:
    folder.mkdir(parents=True)
    values = config.model_dump(mode="json", exclude={"archive", "prepare"})
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    write_manifest(MANIFEST, folder)


def write_checkpoint(folder: Path, config: RunConfig, step: int, history: list[dict[str, float]]) -> keras.Model:
    """A checkpoint with weights of its own; the model that it holds."""
    keras.utils.set_random_seed(step)
    model = make_model(config, MANIFEST)
    freeze_layers(config, model)
    average = WeightAverage(model, 0.9)
    for variable in average.variables:
        variable.assign(variable * 0.5)
    variables = [*model.variables, *make_optimizer(config.optimizer, model).variables, *average.variables]
    thresholds = {"val": [0.1, 0.2, step / 10], "val_ema": [0.3, 0.4, step / 10]}
    state = TrainingState(len(history), step, 0, 8, folder.name, MANIFEST.fingerprint, history, thresholds=thresholds)
    save_checkpoint(folder / "checkpoints", state, variables, spared=4)
    return model


def answers(model: keras.Model) -> np.ndarray:
    images = {"rgb": np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3)).astype(np.uint8)}
    return np.asarray(model(inputs_of(model, images), training=False))


def test_the_best_epochs_model_and_its_average_are_made_from_checkpoints(mlflow_store: str, tmp_path: Path) -> None:
    run = start_run("export", None, {}, {})
    folder = tmp_path / run.run_id
    selection = ["training.selection.metric=val/top_1", "training.ema=0.9"]
    config = load("smoke", [f"training.output={tmp_path}", *selection])
    write_run(folder, config)
    (folder / "checkpoints").mkdir()
    best = write_checkpoint(folder, config, 4, [{"val/top_1": 0.9}])
    newest = write_checkpoint(folder, config, 8, [{"val/top_1": 0.9}, {"val/top_1": 0.5}])

    uri = export_model(folder)
    assert uri.startswith(f"runs:/{run.run_id}/")
    model, description = load_model(uri)
    expected = keras.ops.softmax(answers(best))
    np.testing.assert_allclose(answers(model), expected, rtol=1e-5)
    assert (description.class_names, description.archive) == (("water", "land", "town"), "eurosat_rgb")
    assert description.thresholds == (0.1, 0.2, 0.4)
    averaged, description = load_model(averaged_model_uri(uri))
    assert (description.ema, description.thresholds) == (0.9, (0.3, 0.4, 0.4))
    assert np.abs(answers(averaged) - expected).max() > 1e-3

    export_model(folder, folder / "checkpoints" / "step-00000008.npz")
    chosen, _ = load_model(uri)
    np.testing.assert_allclose(answers(chosen), keras.ops.softmax(answers(newest)), rtol=1e-5)
    models = MlflowClient(mlflow_store).get_run(run.run_id).outputs.model_outputs
    assert sorted(each.step for each in models) == [4, 4, 8, 8]


def test_frozen_layers_have_no_average(mlflow_store: str, tmp_path: Path) -> None:
    run = start_run("export", None, {}, {})
    folder = tmp_path / run.run_id
    frozen = "warm_start={source: /x.npz, frozen_layers: ['stem*']}"
    config = load("smoke", [f"training.output={tmp_path}", "training.ema=0.9", frozen])
    write_run(folder, config)
    (folder / "checkpoints").mkdir()
    trained = write_checkpoint(folder, config, 4, [{"val/top_1": 0.9}])
    uri = export_model(folder)
    expected = keras.ops.softmax(answers(trained))
    np.testing.assert_allclose(answers(load_model(uri)[0]), expected, rtol=1e-5)
    averaged, _ = load_model(averaged_model_uri(uri))
    assert np.abs(answers(averaged) - expected).max() > 1e-3


def test_layers_without_names_are_found_in_every_export_of_a_process(
    mlflow_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nameless.py").write_text(
        "import keras\n\ndef network(images, *, classes, dtype):\n"
        "    return keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(images))\n"
    )
    config = load("smoke", [f"training.output={tmp_path}", "model={name: import, path: 'nameless:network'}"])
    for _ in range(2):
        run = start_run("export", None, {}, {})
        folder = tmp_path / run.run_id
        write_run(folder, config)
        (folder / "checkpoints").mkdir()
        keras.backend.clear_session()  # each training has processes of its own
        trained = write_checkpoint(folder, config, 4, [{}])
        exported, _ = load_model(export_model(folder))
        np.testing.assert_allclose(answers(exported), keras.ops.softmax(answers(trained)), rtol=1e-5)


def test_what_cannot_be_exported_is_one_line(mlflow_store: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run 0123 under .*: give the training\.output"):
        export_model(tmp_path / "0123")
    folder = tmp_path / "4567"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"4567 has no config\.yaml.*training\.resume_run=4567"):
        export_model(folder)
    write_run(tmp_path / "89", load("smoke"))
    with pytest.raises(FileNotFoundError, match="89/checkpoints has 0 checkpoints"):
        export_model(tmp_path / "89")
    made = LocalRun("offline-1", Description("tests", None, {}, {}), 0, is_stored=False)
    made.write(tmp_path / "offline-1")
    with pytest.raises(ValueError, match=r"MLflow does not have run offline-1 yet: `groundswell sync --output"):
        export_model(tmp_path / "offline-1")
    damaged = tmp_path / "89" / "checkpoints"
    damaged.mkdir()
    (damaged / "step-00000004.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"step-00000004\.npz is damaged"):
        export_model(tmp_path / "89", damaged / "step-00000004.npz")
