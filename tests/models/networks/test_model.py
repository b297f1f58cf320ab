"""Whole models: from stored pixels to logits and probabilities."""

import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.augmentation import Augmentation
from models.networks.model import build_model, with_probabilities
from tests.models.built import (
    CONFIGS,
    group_of,
    layers_of,
    model_of,
    network_of,
    normal_images,
    random_images,
    without_gradient,
)
from tests.patience import patient

SENTINEL_GROUPS = [
    group_of("bands_10m", (24, 24, 4), "uint16", 500, 300),
    group_of("bands_20m", (12, 12, 6), "uint16", 900, 400),
    group_of("bands_60m", (4, 4, 2), "uint16", 700, 200),
]
IMAGES = random_images(SENTINEL_GROUPS, largest=3000)


@pytest.fixture(scope="module")
def small():
    return model_of("resnet", SENTINEL_GROUPS, classes=5, upsampling="bicubic", width_factor=0.125)


def test_build_model_maps_stored_pixels_to_logits(small):
    logits = small(IMAGES)
    assert (
        {name: (each.shape[1:], each.dtype) for name, each in small.input.items()},
        small.name,
        logits.shape,
        logits.dtype,
    ) == ({group.name: (group.shape, group.dtype) for group in SENTINEL_GROUPS}, "resnet", (2, 5), tf.float32)


@pytest.mark.parametrize(("task", "function"), [("multi_label", tf.sigmoid), ("single_label", tf.nn.softmax)])
def test_probabilities_have_the_inputs_and_a_copy_of_the_weights(small, task, function):
    served = with_probabilities(small, task)
    assert (served.input.keys(), served.layers[-1].name) == (small.input.keys(), "probabilities")
    assert not {id(variable) for variable in served.variables} & {id(variable) for variable in small.variables}
    np.testing.assert_equal(served.get_weights(), small.get_weights())
    np.testing.assert_allclose(served(IMAGES), function(small(IMAGES)), atol=1e-6)


@pytest.mark.long
def test_saved_model_needs_nothing_but_keras(small, tmp_path):
    served = with_probabilities(small, "multi_label")
    served.save(tmp_path / "model.keras")
    np.savez(tmp_path / "images.npz", **IMAGES)
    script = (
        "import sys, keras, numpy\n"
        "model = keras.saving.load_model('model.keras', safe_mode=True)\n"
        "numpy.save('probabilities.npy', model(dict(numpy.load('images.npz'))).numpy())\n"
        "assert not any(name.split('.')[0] == 'models' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, check=True, timeout=patient(120))
    np.testing.assert_allclose(np.load(tmp_path / "probabilities.npy"), served(IMAGES), atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "augmentation"), [("bfloat16", None), ("float16", Augmentation("flips"))], ids=["none", "flips"]
)
def test_half_precision_computes_so_and_keeps_float32_variables(precision, augmentation, tmp_path):
    settings = {"classes": 5, "augmentation": augmentation, "width_factor": 0.125}
    full, half = (model_of("resnet", SENTINEL_GROUPS, precision=each, **settings) for each in ("float32", precision))
    network = half if augmentation is None else half.network
    assert keras.config.dtype_policy().name == "float32"
    names = ("stem_conv", "stem_bn", "stem_pool", "stage1_block1_relu1", "stage4_block2_add", "pool")
    assert (
        [network.get_layer(name).compute_dtype for name in names],
        {variable.dtype for variable in half.variables},
    ) == ([precision] * 5 + ["float32"], {"float32"})
    np.testing.assert_equal(half.get_weights(), full.get_weights())
    logits = half(IMAGES)
    assert logits.dtype == tf.float32
    np.testing.assert_allclose(logits, full(IMAGES), atol=0.02 * float(tf.reduce_max(tf.abs(full(IMAGES)))))
    served = with_probabilities(half, "multi_label")
    assert {layer.dtype_policy.name for layer in served.layers if getattr(layer, "variables", [])} == {"float32"}
    np.testing.assert_array_equal(served(IMAGES), with_probabilities(full, "multi_label")(IMAGES))
    served.save(tmp_path / "model.keras")
    assert precision not in zipfile.ZipFile(tmp_path / "model.keras").read("config.json").decode()


@pytest.mark.parametrize("network", ["resnet_cifar", "resnet9", "airbench"])
def test_half_precision_of_small_networks_is_served_in_float32_by_keras_own_layers(network):
    half, full = (
        with_probabilities(model_of(network, SENTINEL_GROUPS, precision=each), "single_label")
        for each in ("bfloat16", "float32")
    )
    np.testing.assert_array_equal(half(IMAGES), full(IMAGES))
    assert "groundswell" not in half.to_json()
    assert "bfloat16" not in half.to_json()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("airbench", {}),
        ("resnet9", {"zero_init_residual": False}),
        ("resnet_cifar", {"zero_init_residual": False}),
        ("resnet_cifar", {"zero_init_residual": False, "preactivation": True}),
        ("resnet", {"zero_init_residual": False}),
        ("resnet", {"zero_init_residual": False, "depth": 50}),
    ],
)
def test_gains_that_start_at_one_leave_a_gradient_to_all_that_is_trained(name, settings):
    model = network_of(name, **settings)
    gains = [layer.gamma for layer in layers_of(model, keras.layers.BatchNormalization) if layer.scale]
    assert all(np.all(gain == 1) for gain in gains)
    assert without_gradient(model, samples=8) == set()


@pytest.mark.parametrize(
    ("name", "settings", "before", "after"),
    [
        ("resnet9", {}, "stage1_relu", "stage1_block_relu"),
        ("resnet9", {}, "stage3_relu", "stage3_block_relu"),
        ("resnet_cifar", {"depth": 20}, "stem_relu", "stage1_block3_relu"),
    ],
)
def test_blocks_start_as_their_shortcut(name, settings, before, after):
    model = network_of(name, **settings)
    np.testing.assert_array_equal(
        *keras.Model(model.inputs, [model.get_layer(each).output for each in (before, after)])(normal_images())
    )


AIRBENCH_ENDS = ("whitening", "stage1_relu2", "stage2_relu2", "stage3_relu2")
CIFAR_ENDS = ("stem_relu", "stage1_block1_relu", "stage2_block1_relu", "stage3_block1_relu")
RESNET9_ENDS = ("stem_relu", "stage1_block_relu", "stage2_relu", "stage3_block_relu")


@pytest.mark.parametrize(
    ("name", "settings", "ends", "sides"),
    [
        ("airbench", {}, AIRBENCH_ENDS, [31, 15, 7, 3]),
        ("resnet_cifar", {"stem_stride": 1}, CIFAR_ENDS, [32, 32, 16, 8]),
        ("resnet_cifar", {"stem_stride": 2}, CIFAR_ENDS, [16, 16, 8, 4]),
        ("resnet9", {"stem_stride": 1}, RESNET9_ENDS, [32, 16, 8, 4]),
        ("resnet9", {"stem_stride": 2}, RESNET9_ENDS, [16, 8, 4, 2]),
    ],
)
def test_every_stage_halves_the_side(name, settings, ends, sides):
    model = network_of(name, **settings)
    assert [model.get_layer(end).output.shape[1] for end in ends] == sides
    assert model.count_params() == network_of(name).count_params()


@pytest.mark.parametrize(
    ("name", "settings", "last"),
    [
        ("airbench", {}, "stage3_relu2"),
        ("resnet9", {"stem_stride": 1}, "stage3_relu"),
        ("resnet9", {"stem_stride": 2}, "stage3_relu"),
    ],
)
def test_the_shortest_side_leaves_a_pixel_and_one_less_none(name, settings, last):
    side = CONFIGS[name](**settings).shortest_side
    assert network_of(name, side=side, **settings).get_layer(last).output.shape[1:3] == (1, 1)
    with pytest.raises(ValueError, match=r"dimension size|Computed output size"):
        network_of(name, side=side - settings.get("stem_stride", 1), **settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        *((name, {"width_factor": 0}, "width_factor must be positive, got 0") for name in CONFIGS),
        *((name, {"classes": 0}, "classes must be at least 1, got 0") for name in CONFIGS),
        ("resnet", {"depth": 20}, r"depth must be one of \[18, 34, 50, 101, 152\], got 20"),
        ("resnet_cifar", {"depth": 50}, r"depth must be one of \[2, 8, 20, 32, 44, 56, 110\], got 50"),
    ],
)
def test_empty_networks_and_other_depths_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        network_of(name, **settings)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda model: with_probabilities(model, "regression"), "'regression'"),
        (
            lambda _: build_model(SENTINEL_GROUPS, network="vgg", classes=5, upsampling="nearest", augmentation=None),
            r"network must be one of \('resnet', .*\), got 'vgg'",
        ),
    ],
    ids=["task", "network"],
)
def test_names_that_are_not_known_are_refused(small, use, message):
    with pytest.raises(ValueError, match=message):
        use(small)
