"""ResNet-9 for images of 32 x 32 pixels."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.networks import ResNet9Config
from models.networks.resnet9 import resnet9
from models.networks.stages import cut


def network(*, side=32, width_factor=0.25, stem_stride=1, zero_init_residual=True, stochastic_depth=0.0, dtype=None):
    keras.utils.set_random_seed(0)
    images = keras.Input((side, side, 3), name="rgb")
    settings = {
        "width_factor": width_factor,
        "stem_stride": stem_stride,
        "zero_init_residual": zero_init_residual,
        "stochastic_depth": stochastic_depth,
        "dropout": 0.0,
        "dtype": dtype,
    }
    return keras.Model({"rgb": images}, resnet9(images, classes=10, **settings))


def images_of(samples=2, side=32):
    return {"rgb": np.random.default_rng(0).normal(size=(samples, side, side, 3)).astype(np.float32)}


def test_the_published_network_has_6_5_million_weights():
    convolutions = 9 * (3 * 64 + 64 * 128 + 2 * 128**2 + 128 * 256 + 256 * 512 + 2 * 512**2)
    normalisations = 2 * (64 + 3 * 128 + 256 + 3 * 512)
    model = network(width_factor=1.0)
    assert model.count_params() == convolutions + 2 * normalisations + 512 * 10 + 10
    assert round(convolutions / 1e6, 1) == 6.6
    assert len([layer for layer in model.layers if layer.name.endswith(("conv", "conv1", "conv2", "logits"))]) == 9


@pytest.mark.parametrize(("stem_stride", "sides"), [(1, [32, 16, 8, 4]), (2, [16, 8, 4, 2])])
def test_every_stage_halves_the_side(stem_stride, sides):
    model = network(stem_stride=stem_stride)
    names = ["stem_relu", "stage1_block_relu", "stage2_relu", "stage3_block_relu"]
    assert [model.get_layer(name).output.shape[1] for name in names] == sides
    assert model.count_params() == network().count_params()


@pytest.mark.parametrize("stem_stride", [1, 2])
def test_the_shortest_side_leaves_a_pixel_and_one_less_none(stem_stride):
    side = ResNet9Config(stem_stride=stem_stride).shortest_side
    model = network(side=side, stem_stride=stem_stride)
    assert model.get_layer("stage3_relu").output.shape[1:3] == (1, 1)
    assert np.all(np.isfinite(model(images_of(side=side))))
    with pytest.raises(ValueError, match=r"dimension size|Computed output size"):
        network(side=side - stem_stride, stem_stride=stem_stride)


@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_start_as_their_input(stage):
    model = network()
    ends = [model.get_layer(f"stage{stage}_{name}").output for name in ("relu", "block_relu")]
    before, after = keras.Model(model.inputs, ends)(images_of())
    np.testing.assert_array_equal(before, after)


def test_every_gain_may_start_at_one():
    model = network(zero_init_residual=False)
    assert all(np.all(layer.gamma == 1) for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization))


@pytest.mark.parametrize("zero_init_residual", [True, False])
def test_all_that_is_not_behind_a_gain_of_zero_has_a_gradient(zero_init_residual):
    model = network(zero_init_residual=zero_init_residual)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.nn.log_softmax(model(images_of(), training=True))[:, 0])
    variables = model.trainable_variables
    gradients = tape.gradient(value, [variable.value for variable in variables])
    without = {v.path for v, gradient in zip(variables, gradients, strict=True) if not np.any(gradient)}
    behind = {v.path for v in variables if "_block_" in v.path and "bn2" not in v.path}
    assert without == (behind if zero_init_residual else set())


def test_a_pipeline_cuts_it_between_blocks_and_not_within_them():
    assert [stage.last_layer for stage in cut(network(), 2)] == ["stage1_block_relu", "logits"]
    assert [stage.last_layer for stage in cut(network(), 3)] == ["stage1_relu", "stage2_relu", "logits"]


def test_empty_networks_are_refused():
    with pytest.raises(ValueError, match="width_factor must be positive, got 0"):
        network(width_factor=0)
