"""Training on smaller images: their pixels, and the network behind them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.preprocessing import InputGroup
from models.layers.resolution import TrainingResolution, area_mean, training_size
from models.networks.model import build_model, with_probabilities

GROUP = InputGroup("rgb", (32, 32, 3), "uint8", (120.0, 100.0, 90.0), (60.0,) * 3)
COARSE = InputGroup("nir", (16, 16, 1), "uint16", (900.0,), (400.0,))
RATES = {"dropout": 0.0, "stochastic_depth": 0.0, "zero_init_residual": True}
NETWORK = {
    "network": "resnet_cifar",
    "depth": 8,
    "width_factor": 0.5,
    "preactivation": False,
    "stem_stride": 1,
    **RATES,
}
MODULE = """
import keras

def pooled(input_shape, classes):
    inputs = keras.Input(input_shape)
    inner = keras.Sequential([keras.Input(input_shape), keras.layers.Conv2D(4, 3, strides=2)])
    features = keras.layers.GlobalAveragePooling2D()(inner(inputs))
    return keras.Model(inputs, keras.layers.Dense(classes)(features))

def flat(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
"""


def by_area(images, size):
    """Each pixel is repeated until the small pixels are blocks of whole ones."""
    for axis, small in ((1, size[0]), (2, size[1])):
        large = images.shape[axis]
        images = np.repeat(images, small, axis=axis)
        shape = (*images.shape[:axis], small, large, *images.shape[axis + 1 :])
        images = images.reshape(shape).mean(axis=axis + 1)
    return images


def build(*, groups=(GROUP,), precision="float32", resizes=True, **settings):
    keras.utils.set_random_seed(0)
    rest = {"classes": 5, "upsampling": "nearest", "augmentation": None, **NETWORK, **settings}
    model = build_model(list(groups), precision=precision, resizes=resizes, **rest)
    for layer in [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]:
        # Gains of zero would hide the residual branches from every comparison of outputs.
        layer.gamma.assign(np.random.default_rng(1).uniform(0.5, 1.5, layer.gamma.shape))
    return model


def samples(*groups):
    random = np.random.default_rng(0)
    return {group.name: random.integers(0, 256, (4, *group.shape)).astype(group.dtype) for group in groups or [GROUP]}


@pytest.mark.parametrize(
    ("full", "size"),
    [
        ((32, 32), (16, 16)),
        ((32, 32), (24, 24)),
        ((12, 20), (9, 15)),
        ((12, 20), (6, 5)),
        ((7, 7), (1, 6)),
        ((5, 6),) * 2,
    ],
)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_small_pixel_is_the_mean_over_its_area(full, size, jit_compile):
    images = np.random.default_rng(0).normal(size=(2, *full, 3)).astype(np.float32)
    found = tf.function(lambda x: area_mean(x, size), jit_compile=jit_compile)(images)
    np.testing.assert_allclose(found, by_area(images.astype(np.float64), size), atol=1e-6)


def test_images_do_not_grow():
    for size in ((9, 4), (4, 9), (0, 4)):
        with pytest.raises(ValueError, match=rf"^images of 8 x 8 pixels cannot be averaged to {size[0]} x {size[1]}$"):
            area_mean(tf.zeros((1, 8, 8, 1)), size)


@pytest.mark.parametrize("size", [(16, 16), (24, 24)])
def test_a_network_sees_what_it_would_see_if_the_images_were_that_small(size):
    model, images = build(groups=(GROUP, COARSE)), samples(GROUP, COARSE)
    with training_size(size):
        logits = model(images, training=True)
    nir = np.repeat(np.repeat(images["nir"], 2, axis=1), 2, axis=2)
    joined = np.concatenate([(images["rgb"] - np.array(GROUP.mean)) / 60.0, (nir - 900.0) / 400.0], axis=-1)
    small_group = InputGroup("all", (*size, 4), "float32", (0.0,) * 4, (1.0,) * 4)
    small = build(groups=(small_group,), resizes=False)
    for own, other in zip(small.variables, model.variables[-len(small.variables) :], strict=True):
        assert own.path.rpartition("/")[2] == other.path.rpartition("/")[2]
    expected = small({"all": by_area(joined, size).astype(np.float32)}, training=True)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_outside_of_training_images_are_whole_and_weights_have_the_same_names():
    model, plain, images = build(), build(resizes=False), samples()
    assert [variable.path for variable in model.variables] == [variable.path for variable in plain.variables]
    np.testing.assert_array_equal(model(images, training=True), plain(images, training=True))
    with training_size((16, 16)):
        np.testing.assert_array_equal(model(images, training=False), plain(images, training=False))
        assert not np.array_equal(model(images, training=True), plain(images, training=True))


def test_half_precision_begins_behind_the_mean():
    model, images = build(precision="bfloat16"), samples()
    layer = next(layer for layer in model.layers if isinstance(layer, TrainingResolution))
    assert layer.compute_dtype == "float32"
    with training_size((16, 16)):
        half = model(images, training=True)
        np.testing.assert_allclose(half, build()(images, training=True), atol=0.1)


def test_what_is_served_has_whole_images_and_layers_of_keras_only():
    model, images = build(), samples()
    served = with_probabilities(model, "single_label")
    assert not [layer for layer in served.layers if not type(layer).__module__.startswith("keras.")]
    with training_size((16, 16)):
        expected = with_probabilities(build(resizes=False), "single_label")(images)
        np.testing.assert_array_equal(served(images), expected)


def test_of_networks_by_import_path_those_that_end_with_a_mean_take_any_size(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys_sizes.py").write_text(MODULE)

    def imported(function):
        settings = {"network": "import", "path": f"somebodys_sizes:{function}", "settings": {}}
        keras.utils.set_random_seed(0)
        rest = {"classes": 5, "upsampling": "nearest", "augmentation": None, "resizes": True}
        return build_model([GROUP], **rest, **settings)

    images = samples()
    with training_size((16, 16)):
        assert imported("pooled")(images, training=True).shape == (4, 5)
        with pytest.raises(ValueError, match="incompatible"):
            imported("flat")(images, training=True)
    served = with_probabilities(imported("pooled"), "single_label")
    np.testing.assert_allclose(served(images), keras.ops.softmax(imported("pooled")(images)), atol=1e-6)
