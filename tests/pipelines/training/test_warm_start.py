"""Sources of weights: found on the driver, and read with what is known of bands and classes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from conf.load import load
from conf.schema import RunConfig
from pipelines.dataset.manifest import BandStatistics, Manifest
from pipelines.launch.report import ATTEMPT_VARIABLE
from pipelines.sample import ImageGroup
from pipelines.tracking.model_metadata import ModelMetadata
from pipelines.tracking.models import log_model
from pipelines.tracking.runs import start_run
from pipelines.training import parts
from pipelines.training.accumulation import moving_statistics
from pipelines.training.checkpoint import TrainingState, save_checkpoint
from pipelines.training.recipe import freeze_layers, make_model, make_optimizer
from pipelines.training.settings import recorded_settings
from pipelines.training.trial import build_parts, has_own_parts
from pipelines.training.warm_start import begin_with, check_source, dataset_names

MANIFEST = Manifest(
    archive="image_folder",
    task="single_label",
    class_names=("water", "land"),
    groups=(ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),),
    splits={},
    statistics={"rgb": BandStatistics(mean=(128.0,) * 3, std=(70.0,) * 3)},
    settings={},
    source_fingerprint="abc",
)


def config(*settings: str) -> RunConfig:
    return load("smoke", ["model.width_factor=0.125", *settings])


def model_of(chosen: RunConfig, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return make_model(chosen, MANIFEST)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, keras.Model]:
    earlier = config("input.bands=[red, blue]")
    model = model_of(earlier, 1)
    variables = [*model.variables, *make_optimizer(earlier.optimizer, model).variables]
    settings = {**recorded_settings(earlier), **dataset_names(earlier, MANIFEST)}
    state = TrainingState(1, 4, 0, 8, "run", MANIFEST.fingerprint, [], settings=settings)
    return save_checkpoint(tmp_path, state, variables), model


def test_a_checkpoint_knows_its_bands_and_classes(checkpoint: tuple[Path, keras.Model]) -> None:
    path, earlier = checkpoint
    chosen = config(f"warm_start.source={path}", "input.bands=[blue, green]")
    check_source(chosen.warm_start)
    model = model_of(chosen, 0)
    lines = begin_with(model, chosen, MANIFEST)
    assert lines[0] == f"warm start from {path}"
    assert lines[1] == f"{len(model.variables)} variables start with the weights of the earlier training"
    assert lines[2:] == ["stem_conv.kernel: input channels are taken by the names of their bands"]
    kernels = [np.array(each.get_layer("stem_conv").kernel) for each in (model, earlier)]
    np.testing.assert_array_equal(kernels[0][:, :, 0], kernels[1][:, :, 1])
    np.testing.assert_array_equal(model.get_layer("logits").kernel, earlier.get_layer("logits").kernel)
    others = MANIFEST.model_copy(update={"class_names": ("land", "water")})
    assert "logits.bias starts anew: the classes are others" in begin_with(model, chosen, others)


def test_a_further_attempt_with_a_checkpoint_needs_no_source(
    checkpoint: tuple[Path, keras.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config("warm_start.source=/nowhere/model.keras")
    one: Any = SimpleNamespace(rank=0)

    def begin(folder: Path) -> None:
        parts._begin(chosen, MANIFEST, model_of(chosen, 0), one, folder)

    monkeypatch.setenv(ATTEMPT_VARIABLE, "2")
    begin(checkpoint[0].parent)
    with pytest.raises(ValueError, match="File not found"):
        begin(tmp_path / "empty")  # the attempt before died before its first checkpoint
    monkeypatch.setenv(ATTEMPT_VARIABLE, "1")
    with pytest.raises(ValueError, match="File not found"):
        begin(checkpoint[0].parent)


def test_a_keras_file_goes_by_shape(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    earlier = model_of(config(), 1)
    earlier.save(path)
    chosen = config(f"warm_start.source={path}", "input.augmentation=flips")
    check_source(chosen.warm_start)
    model = model_of(chosen, 0)
    begin_with(model, chosen, MANIFEST)
    for own, other in zip(model.get_weights(), earlier.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)


def test_a_source_with_two_variables_of_one_name_is_refused(tmp_path: Path) -> None:
    def tower(name: str) -> keras.Model:
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(2, name="head")(inputs), name=name)

    images = keras.Input((4,))
    earlier = keras.Model(images, tower("left")(images) + tower("right")(images))
    earlier.save(tmp_path / "towers.keras")
    chosen = config(f"warm_start.source={tmp_path / 'towers.keras'}")
    with pytest.raises(ValueError, match=r"towers\.keras: several of its variables have the name head\.kernel, and"):
        begin_with(model_of(chosen, 0), chosen, MANIFEST)


def test_a_registered_model_is_a_source(mlflow_store: str) -> None:
    earlier = model_of(config("input.bands=[red, blue]"), 1)
    metadata = ModelMetadata(("land", "water"), "single_label", {"rgb": ("red", "blue")}, ("red", "blue"))
    log_model(start_run("warm", None, {}, {}), earlier, metadata, "landcover", step=4)
    chosen = config("warm_start.source=models:/landcover/1", "input.bands=[blue, green]")
    check_source(chosen.warm_start)
    model = model_of(chosen, 0)
    drawn = np.array(model.get_layer("stem_conv").kernel)
    lines = begin_with(model, chosen, MANIFEST)
    assert lines[0] == "warm start from models:/landcover/1"
    assert "logits.bias starts anew: the classes are others" in lines
    own, other = (np.array(each.get_layer("stem_conv").kernel) for each in (model, earlier))
    np.testing.assert_array_equal(own[:, :, 0], other[:, :, 1])
    np.testing.assert_array_equal(own[:, :, 1], drawn[:, :, 1])
    with pytest.raises(ValueError, match="models:/landcover/2"):
        check_source(config("warm_start.source=models:/landcover/2").warm_start)


def test_sources_that_cannot_be_read_are_found_on_the_driver(tmp_path: Path, mlflow_store: str) -> None:
    (tmp_path / "x.npz").write_text("no checkpoint")
    for source, message in (
        ("/x/y.h5", r"expected runs:/\.\.\., models:/\.\.\., a checkpoint \(\.npz\) or a Keras file \(\.keras\)$"),
        (f"{tmp_path}/gone.npz", "there is no such file$"),
        (f"{tmp_path}/x.npz", r"the file is damaged, or no \.npz file$"),
        ("runs:/0123456789abcdef0123456789abcdef/model", "0123456789abcdef"),
    ):
        with pytest.raises(ValueError, match=message):
            check_source(config(f"warm_start.source={source}").warm_start)
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match=r"^warm_start\.source=.*other\.npz: .* is damaged, or no checkpoint"):
        begin_with(model_of(config(), 0), config(f"warm_start.source={tmp_path}/other.npz"), MANIFEST)


def test_frozen_layers_are_no_statistics_and_their_names_are_checked_before_ranks_start() -> None:
    chosen = config("warm_start.source=/x.npz", "warm_start.frozen_layers=['stem_*']")
    model = model_of(chosen, 0)
    before = len(moving_statistics(model))
    assert freeze_layers(chosen, model) == ["stem_bn", "stem_conv"]
    assert len(moving_statistics(model)) == before - 2
    assert all("moving" in variable.name for variable in moving_statistics(model))
    assert has_own_parts(chosen)
    with pytest.raises(ValueError, match=r"^warm_start\.frozen_layers: no layer with weights is called 'stam_\*'"):
        build_parts(config("warm_start.source=/x.npz", "warm_start.frozen_layers=['stam_*']"), MANIFEST)
