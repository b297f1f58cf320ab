"""Training on smaller images: their pixels, and the network behind them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.resolution import TrainingResolution, area_mean, training_size
from models.networks.model import build_model, with_probabilities
from tests.models.built import group_of, layers_of, model_of, random_images

GROUP = group_of("rgb", (32, 32, 3), "uint8", (120, 100, 90), 60)
COARSE = group_of("nir", (16, 16, 1), "uint16", 900, 400)
IMAGES, BOTH = random_images([GROUP], 4, 256), random_images([GROUP, COARSE], 4, 256)
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
        large, images = images.shape[axis], np.repeat(images, small, axis=axis)
        images = images.reshape((*images.shape[:axis], small, large, *images.shape[axis + 1 :])).mean(axis=axis + 1)
    return images


def build(*, groups=(GROUP,), resizes=True, **settings):
    return model_of("resnet_cifar", groups, classes=5, resizes=resizes, **settings)


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
def test_a_small_pixel_is_the_mean_over_its_area(full, size):
    images = np.random.default_rng(0).normal(size=(2, *full, 3)).astype(np.float32)
    found = tf.function(lambda x: area_mean(x, size), jit_compile=True)(images)
    np.testing.assert_allclose(found, by_area(images.astype(np.float64), size), atol=1e-6)


def test_images_do_not_grow():
    for size in ((9, 4), (4, 9), (0, 4)):
        with pytest.raises(ValueError, match=rf"^images of 8 x 8 pixels cannot be averaged to {size[0]} x {size[1]}$"):
            area_mean(tf.zeros((1, 8, 8, 1)), size)


@pytest.mark.parametrize("size", [(16, 16), (24, 24)])
def test_a_network_sees_what_it_would_see_if_the_images_were_that_small(size):
    model = build(groups=(GROUP, COARSE))
    with training_size(size):
        logits = model(BOTH, training=True)
    nir = np.repeat(np.repeat(BOTH["nir"], 2, axis=1), 2, axis=2)
    joined = np.concatenate([(BOTH["rgb"] - np.array(GROUP.mean)) / 60.0, (nir - 900.0) / 400.0], axis=-1)
    small = build(groups=(group_of("all", (*size, 4), "float32"),), resizes=False)
    for own, other in zip(small.variables, model.variables[-len(small.variables) :], strict=True):
        assert own.path.rpartition("/")[2] == other.path.rpartition("/")[2]
    np.testing.assert_allclose(
        logits, small({"all": by_area(joined, size).astype(np.float32)}, training=True), atol=1e-5
    )


def test_outside_of_training_images_are_whole_and_weights_have_the_same_names():
    model, plain = build(), build(resizes=False)
    assert [variable.path for variable in model.variables] == [variable.path for variable in plain.variables]
    np.testing.assert_array_equal(model(IMAGES, training=True), plain(IMAGES, training=True))
    with training_size((16, 16)):
        np.testing.assert_array_equal(model(IMAGES, training=False), plain(IMAGES, training=False))
        assert not np.array_equal(model(IMAGES, training=True), plain(IMAGES, training=True))


def test_half_precision_begins_behind_the_mean():
    model = build(precision="bfloat16")
    assert [layer.compute_dtype for layer in layers_of(model, TrainingResolution)] == ["float32"]
    with training_size((16, 16)):
        np.testing.assert_allclose(model(IMAGES, training=True), build()(IMAGES, training=True), atol=0.1)


def test_what_is_served_has_whole_images_and_layers_of_keras_only():
    served = with_probabilities(build(), "single_label")
    assert not [layer for layer in served.layers if not type(layer).__module__.startswith("keras.")]
    with training_size((16, 16)):
        np.testing.assert_array_equal(served(IMAGES), with_probabilities(build(resizes=False), "single_label")(IMAGES))


def test_of_networks_by_import_path_those_that_end_with_a_mean_take_any_size(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys_sizes.py").write_text(MODULE)

    def imported(function):
        keras.utils.set_random_seed(0)
        rest = {"classes": 5, "upsampling": "nearest", "augmentation": None, "resizes": True, "settings": {}}
        return build_model([GROUP], network="import", path=f"somebodys_sizes:{function}", **rest)

    with training_size((16, 16)):
        assert imported("pooled")(IMAGES, training=True).shape == (4, 5)
        with pytest.raises(ValueError, match="incompatible"):
            imported("flat")(IMAGES, training=True)
    served = with_probabilities(imported("pooled"), "single_label")
    np.testing.assert_allclose(served(IMAGES), keras.ops.softmax(imported("pooled")(IMAGES)), atol=1e-6)
