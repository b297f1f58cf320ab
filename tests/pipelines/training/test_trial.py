"""Parts by import path: found before any rank starts, and trained."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from models.losses import classification_loss
from pipelines.dataset.manifest import BandStatistics, Manifest
from pipelines.sample import ImageGroup
from pipelines.training.recipe import make_exchange, make_model, make_optimizer
from pipelines.training.step import make_train_step
from pipelines.training.trial import build_parts, has_own_parts, try_parts

MANIFEST = Manifest(
    archive="image_folder",
    task="single_label",
    class_names=("dark", "bright"),
    groups=(ImageGroup("rgb", (8, 8, 3), "uint8", ("red", "green", "blue")),),
    splits={},
    statistics={"rgb": BandStatistics(mean=(128.0,) * 3, std=(70.0,) * 3)},
    settings={},
    source_fingerprint="abc",
)
MODULE = """
import keras

def network(images, *, classes, dtype, width):
    x = keras.layers.Conv2D(width, 3, activation="relu", dtype=dtype)(images)
    x = keras.layers.Dropout(0.1, seed=1)(x)
    x = keras.layers.BatchNormalization(dtype=dtype)(x)
    return keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(x))

def darker(images, seeds):
    return {name: group // 2 for name, group in images.items()}

def scaling(input_shape, classes):
    print("a line of somebody's own")
    scaled = keras.layers.Rescaling(1 / 255, name="theirs")
    return keras.Sequential([keras.Input(input_shape), scaled, keras.layers.Flatten(), keras.layers.Dense(classes)])

def flat(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])

def folded(images, *, classes, dtype):
    return keras.layers.Dense(classes)(keras.ops.reshape(images, (-1, 8 * 8 * 3)))

def frozen(images, *, classes, dtype):
    x = keras.layers.Conv2D(4, 3, name="backbone")(images)
    x = keras.layers.Lambda(keras.ops.stop_gradient, output_shape=lambda shape: shape)(x)
    return keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(x))

def noisy(images, seeds):
    import tensorflow as tf
    return {name: tf.cast(tf.random.uniform(tf.shape(group), 0, 255), group.dtype) for name, group in images.items()}

def forgotten(images, seeds):
    return {}

class Unsaved(keras.layers.Layer):
    def __init__(self, width):
        super().__init__()
        self.width = width
    def call(self, x):
        return x * self.width

def twins(images, *, classes, dtype):
    def twin(name):
        inputs = keras.Input((8, 8, 3))
        return keras.Model(inputs, keras.layers.Dense(classes, name="head")(keras.layers.Flatten()(inputs)), name=name)
    return twin("left")(images) + twin("right")(images)

def unsaved(images, *, classes, dtype):
    return keras.layers.Dense(classes)(keras.layers.Flatten()(Unsaved(2)(images)))
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys_trial.py").write_text(MODULE)


def config_of(function: str, settings: str = "{}", *more: str) -> Any:
    return load("smoke", [f"model={{name: import, path: 'somebodys_trial:{function}', settings: {settings}}}", *more])


def test_a_network_that_cannot_be_trained_in_stages_is_refused() -> None:
    chosen = config_of("network", "{width: 4}", "training.mode={name: pipeline, stages: 2}")
    message = r"training\.mode\.stages=2: import cannot be trained in stages, .* or set training\.mode=synchronous$"
    with pytest.raises(ValueError, match=message):
        build_parts(chosen, MANIFEST)


def test_a_network_that_is_not_ours_trains_through_the_recipe(one_rank: Any) -> None:
    config = config_of("network", "{width: 8}")
    assert has_own_parts(config)
    assert not has_own_parts(load("smoke"))
    model = make_model(config, MANIFEST)
    optimizer = make_optimizer(config.optimizer, model)
    optimizer.learning_rate = 1.0
    step = make_train_step(
        model, classification_loss("single_label"), optimizer, make_exchange(config, one_rank), jit_compile=False
    )
    random = np.random.default_rng(0)
    bright = random.integers(0, 2, 64)
    images = (random.integers(0, 128, (64, 8, 8, 3)) + 127 * bright[:, None, None, None]).astype(np.uint8)
    targets = tf.one_hot(bright, 2)
    losses = [float(step({"rgb": tf.constant(images)}, targets)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_layers_that_cannot_be_made_again_are_found_before_training() -> None:
    build_parts(config_of("network", "{width: 8}"), MANIFEST)
    with pytest.raises(ValueError, match=r"^model\.path=somebodys_trial:unsaved: the trained model could not be saved"):
        build_parts(config_of("unsaved"), MANIFEST)


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer=lars",
        "exchange.codec=powersgd",
        "training.ema=0.9",
        "training.mode={name: pipeline, stages: 2}",
        "training.mode=parameter_server",
        "warm_start.source=earlier.keras",
    ],
)
def test_variables_with_one_path_are_refused_where_something_is_kept_by_it(setting: str) -> None:
    plain = ["optimizer=sgd"] if setting != "optimizer=lars" else []
    message = (
        rf"^model\.path=somebodys_trial:twins: 2 paths .*, and {setting.partition('=')[0]}.* by their paths: rename"
    )
    with pytest.raises(ValueError, match=message):
        build_parts(config_of("twins", "{}", *plain, setting), MANIFEST)
    build_parts(config_of("twins", "{}", "optimizer=sgd"), MANIFEST)


def test_a_network_that_scales_normalised_images_is_told(caplog: pytest.LogCaptureFixture) -> None:
    try_parts(config_of("scaling"), MANIFEST)
    assert "layer theirs of the network scales its images, and gets those that are normalised" in caplog.text
    assert build_parts(config_of("network", "{width: 8}"), MANIFEST) == []


def test_a_network_whose_batch_norm_knows_no_ranks_is_named_with_the_setting() -> None:
    with pytest.raises(
        ValueError, match=r"^model\.batch_norm_ranks=2: .* is Keras's own: .*, or set model\.batch_norm_ranks=1$"
    ):
        build_parts(config_of("network", "{width: 8}", "model.batch_norm_ranks=2"), MANIFEST)


def test_a_network_that_needs_images_of_one_size_has_no_resolution_schedule() -> None:
    sizes = "input.resolution_schedule=[{until: {fraction: 0.5}, scale: 0.5}]"
    build_parts(config_of("network", "{width: 8}", sizes), MANIFEST)
    for function in ("flat", "folded"):
        build_parts(config_of(function), MANIFEST)
        with pytest.raises(
            ValueError,
            match=r"^input\.resolution_schedule has images of 4 x 4 pixels, and "
            rf"model\.path=somebodys_trial:{function} cannot take them \(.*\): leave it out, or let the network "
            r"end with a mean over all pixels$",
        ):
            build_parts(config_of(function, "{}", sizes), MANIFEST)


def test_a_network_that_stops_gradients_is_refused_by_the_variable() -> None:
    message = (
        r"^model\.path=somebodys_trial:frozen: 2 trainable variables have no gradient, such as backbone/kernel: set "
    )
    with pytest.raises(ValueError, match=message):
        build_parts(config_of("frozen"), MANIFEST)


def test_the_stages_of_a_pipeline_see_the_same_images() -> None:
    def chosen(name: str, *more: str) -> Any:
        path = f"{{name: import, path: 'somebodys_trial:{name}'}}"
        return load("smoke", [f"input.augmentation={path}", "model.width_factor=0.125", *more])

    pipeline = "training.mode={name: pipeline, stages: 2}"
    build_parts(chosen("darker", pipeline), MANIFEST)
    build_parts(chosen("noisy"), MANIFEST)
    with pytest.raises(ValueError, match=r"^input\.augmentation\.path=somebodys_trial:noisy gives other images for"):
        build_parts(chosen("noisy", pipeline), MANIFEST)


def test_an_augmentation_is_tried_on_two_samples() -> None:
    def config(name: str) -> Any:
        path = f"{{name: import, path: 'somebodys_trial:{name}'}}"
        return load("smoke", [f"input.augmentation={path}", "model.width_factor=0.125"])

    assert has_own_parts(config("darker"))
    build_parts(config("darker"), MANIFEST)
    with pytest.raises(ValueError, match=r"^input\.augmentation\.path=somebodys_trial:forgotten: .* returned \{\}"):
        build_parts(config("forgotten"), MANIFEST)


def test_the_driver_tries_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"^model\.path=somebodys_trial:network: the function raised TypeError: .*width"
    ):
        try_parts(config_of("network"), MANIFEST)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="building the model ended with exit code 1: no message"):
        try_parts(config_of("network"), MANIFEST)
