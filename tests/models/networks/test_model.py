"""Whole models: from stored pixels to logits and probabilities."""

import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.networks import AirbenchConfig, ResNet9Config, ResNetCifarConfig
from models.layers.augmentation import Augmentation
from models.layers.preprocessing import InputGroup
from models.networks.model import build_model, with_probabilities
from tests.patience import patient

SENTINEL_GROUPS = [
    InputGroup("bands_10m", (24, 24, 4), "uint16", (500.0,) * 4, (300.0,) * 4),
    InputGroup("bands_20m", (12, 12, 6), "uint16", (900.0,) * 6, (400.0,) * 6),
    InputGroup("bands_60m", (4, 4, 2), "uint16", (700.0,) * 2, (200.0,) * 2),
]


def sentinel_images(samples=2):
    generator = np.random.default_rng(0)
    return {group.name: generator.integers(0, 3000, (samples, *group.shape), np.uint16) for group in SENTINEL_GROUPS}


@pytest.fixture(scope="module")
def small():
    keras.utils.set_random_seed(0)
    model = build_model(
        SENTINEL_GROUPS,
        network="resnet",
        classes=5,
        upsampling="bicubic",
        augmentation=None,
        depth=18,
        width_factor=0.125,
        dropout=0.0,
        stochastic_depth=0.0,
        zero_init_residual=True,
    )
    for layer in [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]:
        # Gains of zero would hide the residual branches from every comparison of outputs.
        layer.gamma.assign(np.random.default_rng(1).uniform(0.5, 1.5, layer.gamma.shape))
    return model


def test_build_model_maps_stored_pixels_to_logits(small):
    logits = small(sentinel_images())
    assert small.name == "resnet"
    assert {name: (each.shape[1:], each.dtype) for name, each in small.input.items()} == {
        group.name: (group.shape, group.dtype) for group in SENTINEL_GROUPS
    }
    assert logits.shape == (2, 5)
    assert logits.dtype == tf.float32


def test_compiles_with_integer_inputs(small):
    images = sentinel_images()
    compiled = tf.function(small, jit_compile=True)
    np.testing.assert_allclose(compiled(images), small(images), atol=1e-4)


@pytest.mark.parametrize(("task", "function"), [("multi_label", tf.sigmoid), ("single_label", tf.nn.softmax)])
def test_probabilities_have_the_inputs_and_a_copy_of_the_weights(small, task, function):
    served = with_probabilities(small, task)
    images = sentinel_images()
    assert served.input.keys() == small.input.keys()
    assert served.layers[-1].name == "probabilities"
    assert not {id(variable) for variable in served.variables} & {id(variable) for variable in small.variables}
    for own, other in zip(served.get_weights(), small.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)
    np.testing.assert_allclose(served(images), function(small(images)), atol=1e-6)


def test_probabilities_of_an_unknown_task_are_rejected(small):
    with pytest.raises(ValueError, match="'regression'"):
        with_probabilities(small, "regression")


@pytest.mark.long
def test_saved_model_needs_nothing_but_keras(small, tmp_path):
    images = sentinel_images()
    served = with_probabilities(small, "multi_label")
    served.save(tmp_path / "model.keras")
    np.savez(tmp_path / "images.npz", **images)
    script = (
        "import sys, keras, numpy\n"
        "model = keras.saving.load_model('model.keras', safe_mode=True)\n"
        "numpy.save('probabilities.npy', model(dict(numpy.load('images.npz'))).numpy())\n"
        "assert not any(name.split('.')[0] == 'models' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, check=True, timeout=patient(120))
    np.testing.assert_allclose(np.load(tmp_path / "probabilities.npy"), served(images), atol=1e-6)


def test_an_unknown_network_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"network must be one of \('resnet', .*\), got 'vgg'"):
        build_model(SENTINEL_GROUPS, network="vgg", classes=5, upsampling="nearest", augmentation=None)


@pytest.mark.parametrize("augmentation", [None, Augmentation("flips")], ids=["none", "flips"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_computes_so_and_keeps_float32_variables(precision, augmentation, tmp_path):
    def build(chosen):
        keras.utils.set_random_seed(0)
        settings = {
            "depth": 18,
            "width_factor": 0.125,
            "dropout": 0.0,
            "stochastic_depth": 0.0,
            "zero_init_residual": True,
        }
        rest = {"upsampling": "nearest", "augmentation": augmentation, "precision": chosen}
        return build_model(SENTINEL_GROUPS, network="resnet", classes=5, **rest, **settings)

    full, half = build("float32"), build(precision)
    network = half if augmentation is None else half.network
    assert keras.config.dtype_policy().name == "float32"
    for name in ("stem_conv", "stem_bn", "stem_pool", "stage1_block1_relu1", "stage4_block2_add"):
        assert network.get_layer(name).compute_dtype == precision
    assert {variable.dtype for variable in half.variables} == {"float32"}
    for own, other in zip(half.get_weights(), full.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)
    images = sentinel_images()
    logits = half(images)
    assert logits.dtype == tf.float32
    np.testing.assert_allclose(logits, full(images), atol=0.02 * float(tf.reduce_max(tf.abs(full(images)))))
    served = with_probabilities(half, "multi_label")
    assert {layer.dtype_policy.name for layer in served.layers if getattr(layer, "variables", [])} == {"float32"}
    np.testing.assert_array_equal(served(images), with_probabilities(full, "multi_label")(images))
    served.save(tmp_path / "model.keras")
    assert precision not in zipfile.ZipFile(tmp_path / "model.keras").read("config.json").decode()


@pytest.mark.parametrize(
    "settings", [ResNetCifarConfig(), ResNet9Config(), AirbenchConfig()], ids=lambda each: each.name
)
def test_half_precision_of_small_networks_is_served_in_float32_by_keras_own_layers(settings):
    def served(precision):
        keras.utils.set_random_seed(0)
        rest = {"upsampling": "nearest", "augmentation": None, "precision": precision}
        chosen = {**settings.arguments(), "width_factor": 0.25}
        model = build_model(SENTINEL_GROUPS, network=settings.name, classes=10, **rest, **chosen)
        return with_probabilities(model, "single_label")

    half, images = served("bfloat16"), sentinel_images()
    np.testing.assert_array_equal(half(images), served("float32")(images))
    assert "groundswell" not in half.to_json()
    assert "bfloat16" not in half.to_json()
