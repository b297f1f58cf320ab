"""ResNet for images of 32 x 32 pixels."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.networks.resnet_cifar import resnet_cifar


def network(depth, *, width_factor=1.0, preactivation=False, zero_init_residual=True, stem_stride=1, dtype=None):
    keras.utils.set_random_seed(0)
    images = keras.Input((32, 32, 3), name="rgb")
    settings = {
        "depth": depth,
        "width_factor": width_factor,
        "preactivation": preactivation,
        "stem_stride": stem_stride,
        "dtype": dtype,
    }
    settings |= {"dropout": 0.0, "stochastic_depth": 0.0, "zero_init_residual": zero_init_residual}
    return keras.Model({"rgb": images}, resnet_cifar(images, classes=10, **settings))


def images_of(samples=2):
    return {"rgb": np.random.default_rng(0).normal(size=(samples, 32, 32, 3)).astype(np.float32)}


@pytest.mark.parametrize(
    ("depth", "millions"), [(2, 0.0), (8, 0.08), (20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)]
)
def test_parameters_are_those_of_the_papers_table_6(depth, millions):
    model = network(depth)
    blocks = (depth - 2) // 6
    expected = 9 * 3 * 16 + 2 * 16 + 64 * 10 + 10
    channels_in = 16
    for channels in (16, 32, 64):
        for _ in range(blocks):
            expected += 9 * channels_in * channels + 9 * channels * channels + 4 * channels
            channels_in = channels
    count = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert count == expected
    assert round(count / 1e6, 2 if millions < 1 else 1) == millions
    convolutions = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    assert len(convolutions) == depth - 1


@pytest.mark.parametrize("preactivation", [False, True])
def test_a_shortcut_takes_every_second_pixel_and_adds_zeros(preactivation):
    model = network(20, preactivation=preactivation)
    joined = keras.Model(model.inputs, [model.get_layer("stage2_block1_add").input[0], _before(model, preactivation)])
    shortcut, before = joined(images_of())
    assert shortcut.shape == (2, 16, 16, 32)
    np.testing.assert_array_equal(shortcut[..., :16], before[:, ::2, ::2])
    assert not np.any(shortcut[..., 16:])


def _before(model, preactivation):
    return model.get_layer("stage1_block3_add" if preactivation else "stage1_block3_relu").output


def test_a_stride_in_the_stem_halves_every_stage():
    plain, halved = network(8), network(8, stem_stride=2)
    for stage in (1, 2, 3):
        sides = [model.get_layer(f"stage{stage}_block1_relu").output.shape[1] for model in (plain, halved)]
        assert sides == [2 * sides[1], 32 >> stage]
    assert [each.shape for each in plain.variables] == [each.shape for each in halved.variables]
    assert halved(images_of()).shape == (2, 10)


def test_every_gain_may_start_at_one():
    model = network(20, zero_init_residual=False)
    assert all(np.all(layer.gamma == 1) for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization))


def test_blocks_start_as_their_shortcut():
    model = network(20)
    ends = [model.get_layer(f"stage1_block{number}_relu").output for number in (1, 2, 3)]
    stem, *ends = keras.Model(model.inputs, [model.get_layer("stem_relu").output, *ends])(images_of())
    for end in ends:
        np.testing.assert_array_equal(end, stem)


def test_preactivated_blocks_have_normalisation_and_activation_before_a_convolution():
    model = network(20, preactivation=True)
    for conv in [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)][1:]:
        activation = conv.input._keras_history.operation
        assert isinstance(activation, keras.layers.ReLU)
        assert isinstance(activation.input._keras_history.operation, keras.layers.BatchNormalization)
    assert isinstance(model.get_layer("pool").input._keras_history.operation, keras.layers.ReLU)
    assert count_of(model) == count_of(network(20)) + 2 * 64 - 2 * 16 - (2 * 32 - 2 * 16) - (2 * 64 - 2 * 32)


def count_of(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


@pytest.mark.parametrize("preactivation", [False, True])
def test_every_variable_has_a_gradient(preactivation):
    model = network(20, preactivation=preactivation)
    for variable in model.trainable_variables:
        if variable.path.endswith("gamma"):
            variable.assign(tf.ones(variable.shape))
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.nn.log_softmax(model(images_of(), training=True))[:, 0])
    gradients = tape.gradient(value, [variable.value for variable in model.trainable_variables])
    assert all(np.any(gradient) for gradient in gradients)


def test_other_depths_and_empty_networks_are_refused():
    with pytest.raises(ValueError, match=r"depth must be one of \[2, 8, 20, 32, 44, 56, 110\], got 50"):
        network(50)
    with pytest.raises(ValueError, match="width_factor must be positive, got 0"):
        network(20, width_factor=0)
