"""Networks by import path: both forms of the function, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.networks.model import build_model, with_probabilities
from tests.models.built import group_of, layers_of, random_images

GROUPS = [group_of("rgb", (32, 32, 3), "uint8", 120, 60)]
IMAGES = random_images(GROUPS)
MODULE = """
import keras

def graph(images, *, classes, dtype, width):
    x = keras.layers.Conv2D(width, 3, name="theirs")(images)
    x = keras.layers.GlobalMaxPooling2D()(x)
    return keras.layers.Dense(classes)(x)

def nested(input_shape, classes, activation=None, weights="imagenet"):
    assert weights is None
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])

def no_model(input_shape, classes): return 3
def no_logits(images, *, classes, dtype): return images
def nothing(images, *, classes, dtype): pass
def broken(images, *, classes, dtype): raise KeyError("no key\\nsecond line")
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys_network.py").write_text(MODULE)


def build(function, *, module="somebodys_network", precision="float32", groups=GROUPS, **settings):
    keras.utils.set_random_seed(0)
    chosen = {"path": f"{module}:{function}", "settings": settings}
    rest = {"upsampling": "nearest", "augmentation": None, "precision": precision}
    return build_model(groups, network="import", classes=5, **rest, **chosen)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_function_continues_the_graph_and_is_served_in_float32(precision):
    model = build("graph", precision=precision, width=7)
    theirs, logits = model.get_layer("theirs"), model(IMAGES)
    assert (theirs.filters, theirs.compute_dtype, logits.shape, logits.dtype) == (7, precision, (2, 5), "float32")
    assert keras.config.dtype_policy().name == "float32"
    np.testing.assert_allclose(
        with_probabilities(model, "single_label")(IMAGES), keras.ops.softmax(build("graph", width=7)(IMAGES)), atol=1e-6
    )


def test_a_function_with_an_input_shape_returns_a_model():
    model = build("nested")
    assert (model(IMAGES).shape, [variable.shape for variable in model.trainable_variables]) == (
        (2, 5),
        [(3072, 5), (5,)],
    )


def test_a_network_of_keras_applications_gives_logits_and_is_served():
    model = build("MobileNet", module="keras.applications", precision="bfloat16", alpha=0.25, dropout=0.0)
    np.testing.assert_allclose(keras.ops.sum(keras.ops.softmax(model(IMAGES)), -1), 1.0, rtol=1e-5)
    assert float(keras.ops.min(model(IMAGES))) < 0  # no probabilities
    (inner,) = layers_of(model, keras.Model)
    assert inner.get_layer("conv1").compute_dtype == "bfloat16"
    served = with_probabilities(model, "multi_label")
    assert "bfloat16" not in served.to_json()
    np.testing.assert_equal(served.get_weights(), model.get_weights())


def test_a_network_of_keras_gets_no_scaling_of_pixels_that_are_normalised():
    def scalings(**settings):
        model = build("MobileNetV3Small", module="keras.applications", alpha=0.75, **settings)
        return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Rescaling)]

    assert scalings() == []
    assert len(scalings(include_preprocessing=True)) == 1, "the settings may say otherwise"


@pytest.mark.filterwarnings("ignore:This model usually expects 1 or 3 input channels")
def test_a_network_of_keras_trains_on_twelve_bands_of_three_resolutions():
    sizes = ((36, 4), (18, 6), (6, 2))
    groups = [group_of(f"bands_{side}", (side, side, bands), "uint16", 500, 300) for side, bands in sizes]
    model = build("MobileNet", module="keras.applications", groups=groups, alpha=0.25, dropout=0.0)
    (inner,) = layers_of(model, keras.Model)
    kernel = inner.get_layer("conv1").kernel
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(model(random_images(groups, 8, 2000), training=True)[:, 0] ** 2)
    by_band = np.abs(tape.gradient(value, kernel.value)).max(axis=(0, 1, 3))
    assert by_band.shape == (12,)
    assert (by_band > 0).all(), "every band is used"


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("graph", {}, r"the function raised TypeError: graph\(\) missing 1 required keyword-only argument: 'width'$"),
        (
            "graph",
            {"depth": 3},
            r"the function raised TypeError: graph\(\) got an unexpected keyword argument 'depth'$",
        ),
        ("broken", {}, r"the function raised KeyError: 'no key"),
        ("nothing", {}, r"the network returns a NoneType, expected logits of shape \(None, 5\), one per class$"),
        ("no_logits", {}, r"the network returns \(None, 32, 32, 3\), expected logits of shape \(None, 5\)"),
        ("no_model", {}, r"TypeError: a function with an argument input_shape returns a keras\.Model, got a int$"),
        (
            "nested",
            {"classifier_activation": "softmax"},
            r"classifier_activation=softmax gives no logits: leave it out$",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(function, settings, message):
    with pytest.raises(ValueError, match=rf"^model\.path=somebodys_network:{function}: .*{message}") as caught:
        build(function, **settings)
    assert "\n" not in str(caught.value)
    assert keras.config.dtype_policy().name == "float32"
