"""Sources of weights: found on the driver, and read with what is known of bands and classes."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from conf.load import load
from conf.schema import RunConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.launch.rank.report import ATTEMPT_VARIABLE
from pipelines.storage.folder import Location
from pipelines.tracking.models.model_metadata import ModelMetadata
from pipelines.tracking.models.models import log_model
from pipelines.tracking.store.runs import start_run
from pipelines.training.checkpoint.settings import recorded_settings
from pipelines.training.checkpoint.state import TrainingState, save_checkpoint
from pipelines.training.driver.trial import build_parts, has_own_parts
from pipelines.training.setup import rank_setup
from pipelines.training.setup.recipe import freeze_layers, make_model, make_optimizer
from pipelines.training.setup.warm_start import begin_with, check_source, dataset_names
from pipelines.training.step.accumulation import moving_statistics
from tests.pipelines.training.manifests import rgb_manifest

MANIFEST = rgb_manifest()


def config(*settings: str) -> RunConfig:
    return load("smoke", ["model.width_factor=0.125", *settings])


def model_of(chosen: RunConfig, seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return make_model(chosen, MANIFEST)


def begin(*settings: str, manifest: Manifest = MANIFEST) -> tuple[keras.Model, list[str]]:
    """A model that begins with the source of the settings, which the driver has checked; what it said."""
    chosen = config(*settings)
    check_source(chosen.warm_start)
    model = model_of(chosen)
    return model, begin_with(model, chosen.warm_start, manifest, chosen.input.bands)


def stem(model: keras.Model) -> np.ndarray:
    return np.array(model.get_layer("stem_conv").kernel)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Location, keras.Model]:
    earlier = config("input.bands=[red, blue]")
    model = model_of(earlier, 1)
    variables = [*model.variables, *make_optimizer(earlier.optimizer, model).variables]
    settings = {**recorded_settings(earlier), **dataset_names(MANIFEST, earlier.input.bands)}
    state = TrainingState(1, 4, 0, 8, "run", MANIFEST.fingerprint, [], settings=settings)
    return save_checkpoint(Location.at(tmp_path), state, variables), model


def test_a_checkpoint_knows_its_bands_and_classes(checkpoint: tuple[Location, keras.Model]) -> None:
    path, earlier = checkpoint
    settings = (f"warm_start.source={path}", "input.bands=[blue, green]")
    model, lines = begin(*settings)
    assert lines == [
        f"warm start from {path}",
        f"{len(model.variables)} variables start with the weights of the earlier training",
        "stem_conv.kernel: input channels are taken by the names of their bands",
    ]
    np.testing.assert_array_equal(stem(model)[:, :, 0], stem(earlier)[:, :, 1])
    np.testing.assert_array_equal(model.get_layer("logits").kernel, earlier.get_layer("logits").kernel)
    others = MANIFEST.model_copy(update={"class_names": ("land", "water")})
    assert "logits.bias starts from random weights: the classes are others" in begin(*settings, manifest=others)[1]


@pytest.mark.parametrize(
    ("attempt", "folder", "begins"),
    [("2", ".", True), ("2", "empty", False), ("1", ".", False)],  # "empty": it died before its first checkpoint
)
def test_a_further_attempt_with_a_checkpoint_needs_no_source(
    checkpoint: tuple[Location, keras.Model], attempt: str, folder: str, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, one = config("warm_start.source=/nowhere/model.keras"), SimpleNamespace(rank=0)
    monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
    with nullcontext() if begins else pytest.raises(ValueError, match="File not found"):
        rank_setup._begin(chosen, MANIFEST, checkpoint[1], one, checkpoint[0].parent / folder)  # type: ignore[arg-type]


def test_a_keras_file_goes_by_shape(tmp_path: Path) -> None:
    earlier = model_of(config(), 1)
    earlier.save(tmp_path / "model.keras")
    model, _ = begin(f"warm_start.source={tmp_path / 'model.keras'}", "input.augmentation=flips")
    np.testing.assert_equal(model.get_weights(), earlier.get_weights())


def test_a_source_with_two_variables_of_one_name_is_refused(tmp_path: Path) -> None:
    def tower(name: str) -> keras.Model:
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(2, name="head")(inputs), name=name)

    images = keras.Input((4,))
    keras.Model(images, tower("left")(images) + tower("right")(images)).save(tmp_path / "towers.keras")
    with pytest.raises(ValueError, match=r"towers\.keras: several of its variables have the name head\.kernel, and"):
        begin(f"warm_start.source={tmp_path / 'towers.keras'}")


def test_a_registered_model_is_a_source(mlflow_store: str) -> None:
    earlier = model_of(config("input.bands=[red, blue]"), 1)
    metadata = ModelMetadata(("land", "water"), "single_label", {"rgb": ("red", "blue")}, ("red", "blue"))
    log_model(start_run("warm", None, {}, {}), earlier, metadata, "landcover", step=4)
    settings = ("warm_start.source=models:/landcover/1", "input.bands=[blue, green]")
    drawn = stem(model_of(config(*settings)))
    model, (first, *lines) = begin(*settings)
    assert first == "warm start from models:/landcover/1"
    assert "logits.bias starts from random weights: the classes are others" in lines
    np.testing.assert_array_equal(stem(model)[:, :, 0], stem(earlier)[:, :, 1])
    np.testing.assert_array_equal(stem(model)[:, :, 1], drawn[:, :, 1])
    with pytest.raises(ValueError, match="models:/landcover/2"):
        check_source(config("warm_start.source=models:/landcover/2").warm_start)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/x/y.h5", r"expected runs:/\.\.\., models:/\.\.\., a checkpoint \(\.npz\) or a Keras file \(\.keras\)$"),
        ("{}/gone.npz", "there is no such file$"),
        ("{}/x.npz", r"the file is damaged, or no \.npz file$"),
        ("runs:/0123456789abcdef0123456789abcdef/model", "0123456789abcdef"),
    ],
)
def test_sources_that_cannot_be_read_are_found_on_the_driver(
    tmp_path: Path, module_mlflow_store: str, source: str, message: str
) -> None:
    (tmp_path / "x.npz").write_text("no checkpoint")
    with pytest.raises(ValueError, match=message):
        check_source(config(f"warm_start.source={source.format(tmp_path)}").warm_start)


def test_a_file_that_is_no_checkpoint_is_found_by_rank_0(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match=r"^warm_start\.source=.*other\.npz: .* is damaged, or no checkpoint"):
        begin(f"warm_start.source={tmp_path}/other.npz")


def test_frozen_layers_are_no_statistics_and_their_names_are_checked_before_ranks_start() -> None:
    chosen = config("warm_start.source=/x.npz", "warm_start.frozen_layers=['stem_*']")
    model = model_of(chosen)
    before = len(moving_statistics(model))
    assert freeze_layers(chosen.warm_start, model) == ["stem_bn", "stem_conv"]
    statistics = moving_statistics(model)
    assert (len(statistics), all("moving" in variable.name for variable in statistics)) == (before - 2, True)
    assert has_own_parts(chosen)
    with pytest.raises(ValueError, match=r"^warm_start\.frozen_layers: no layer with weights is called 'stam_\*'"):
        build_parts(config("warm_start.source=/x.npz", "warm_start.frozen_layers=['stam_*']"), MANIFEST)
