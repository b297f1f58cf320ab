"""Parts by import path: found before any rank starts, and trained."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from pipelines.training.driver.trial import build_parts, has_own_parts, try_parts
from tests.pipelines.training.manifests import rgb_manifest

MANIFEST = rgb_manifest((8, 8, 3))
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


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (
            "network",
            ["training.mode={name: pipeline, stages: 2}"],
            r"training\.mode\.stages=2: import cannot be trained in stages, .* or set training\.mode=synchronous$",
        ),
        ("unsaved", [], r"^model\.path=somebodys_trial:unsaved: the trained model could not be saved"),
        (
            "network",
            ["model.batch_norm_ranks=2"],
            r"^model\.batch_norm_ranks=2: .* is Keras's own: .*, or set model\.batch_norm_ranks=1$",
        ),
        (
            "frozen",
            [],
            r"^model\.path=somebodys_trial:frozen: 2 trainable variables have no gradient, such as backbone/kernel: ",
        ),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(function: str, settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_parts(config_of(function, "{width: 4}" if function == "network" else "{}", *settings), MANIFEST)


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "optimizer=lars",
        "exchange.codec=powersgd",
        "training.ema=0.9",
        "training.mode={name: pipeline, stages: 2}",
        "training.mode=parameter_server",
        "warm_start.source=earlier.keras",
    ],
)
def test_variables_with_one_path_are_refused_where_something_is_kept_by_it(setting: str) -> None:
    chosen = config_of("twins", "{}", *filter(None, ["optimizer=sgd" if "lars" not in setting else "", setting]))
    message = (
        rf"^model\.path=somebodys_trial:twins: 2 paths .*, and {setting.partition('=')[0]}.* by their paths: rename"
    )
    with pytest.raises(ValueError, match=message) if setting else nullcontext():
        build_parts(chosen, MANIFEST)


@pytest.mark.long
def test_a_network_that_scales_normalised_images_is_told(caplog: pytest.LogCaptureFixture) -> None:
    try_parts(config_of("scaling"), MANIFEST)
    assert "layer theirs of the network scales its images, and gets those that are normalised" in caplog.text
    assert build_parts(config_of("network", "{width: 8}"), MANIFEST) == []


@pytest.mark.parametrize("function", ["flat", "folded", "network"])
def test_a_network_that_needs_images_of_one_size_has_no_resolution_schedule(function: str) -> None:
    sizes = "input.resolution_schedule=[{until: {fraction: 0.5}, scale: 0.5}]"
    settings = "{width: 8}" if function == "network" else "{}"
    build_parts(config_of(function, settings), MANIFEST)
    message = (
        rf"^input\.resolution_schedule has images of 4 x 4 pixels, and model\.path=somebodys_trial:{function} cannot "
        r"take them \(.*\): leave it out, or let the network end with a mean over all pixels$"
    )
    with nullcontext() if function == "network" else pytest.raises(ValueError, match=message):
        build_parts(config_of(function, settings, sizes), MANIFEST)


@pytest.mark.parametrize(
    ("augmentation", "settings", "message"),
    [
        ("darker", [], ""),
        ("forgotten", [], r"^input\.augmentation\.path=somebodys_trial:forgotten: .* returned \{\}"),
        # The stages of a pipeline see the same images.
        ("darker", ["training.mode={name: pipeline, stages: 2}"], ""),
        ("noisy", [], ""),
        (
            "noisy",
            ["training.mode={name: pipeline, stages: 2}"],
            r"^input\.augmentation gives other images for",
        ),
    ],
)
def test_an_augmentation_is_tried_on_two_samples(augmentation: str, settings: list[str], message: str) -> None:
    path = f"{{name: import, path: 'somebodys_trial:{augmentation}'}}"
    chosen = load("smoke", [f"input.augmentation={path}", "model.width_factor=0.125", *settings])
    assert has_own_parts(chosen)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        build_parts(chosen, MANIFEST)


@pytest.mark.long
def test_the_driver_tries_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"^model\.path=somebodys_trial:network: the function raised TypeError: .*width"
    ):
        try_parts(config_of("network"), MANIFEST)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="building the model ended with exit code 1: no message"):
        try_parts(config_of("network"), MANIFEST)
