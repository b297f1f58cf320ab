"""ResNet for images of 32 x 32 pixels."""

import keras
import numpy as np
import pytest

from tests.models.built import layers_of, network_of, normal_images


@pytest.mark.parametrize(("depth", "millions"), [(2, 0.0), (8, 0.08), (20, 0.27), (110, 1.7)])
def test_parameters_are_those_of_the_papers_table_6(depth, millions):
    model = network_of("resnet_cifar", depth=depth, width_factor=1.0)
    expected = 9 * 3 * 16 + 2 * 16 + (64 if depth > 2 else 16) * 10 + 10
    for channels_in, channels in ((16, 16), (16, 32), (32, 64)):
        inner = (depth - 2) // 6 * 2 - 1  # convolutions that keep the number of channels
        if inner > 0:
            expected += 9 * channels_in * channels + inner * 9 * channels**2 + (inner + 1) * 2 * channels
    count = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert (count, round(count / 1e6, 2 if millions < 1 else 1), len(layers_of(model, keras.layers.Conv2D))) == (
        expected,
        millions,
        depth - 1,
    )


@pytest.mark.parametrize(("preactivation", "end"), [(False, "relu"), (True, "add")])
def test_a_shortcut_takes_every_second_pixel_and_adds_zeros(preactivation, end):
    model = network_of("resnet_cifar", depth=20, width_factor=1.0, preactivation=preactivation)
    ends = [model.get_layer("stage2_block1_add").input[0], model.get_layer(f"stage1_block3_{end}").output]
    shortcut, before = keras.Model(model.inputs, ends)(normal_images())
    assert shortcut.shape == (2, 16, 16, 32)
    np.testing.assert_array_equal(shortcut[..., :16], before[:, ::2, ::2])
    assert not np.any(shortcut[..., 16:])


def test_preactivated_blocks_have_normalisation_and_activation_before_a_convolution():
    model, plain = (
        network_of("resnet_cifar", depth=20, width_factor=1.0, preactivation=each) for each in (True, False)
    )
    for layer in [*layers_of(model, keras.layers.Conv2D)[1:], model.get_layer("pool")]:
        activation = layer.input._keras_history.operation
        assert isinstance(activation, keras.layers.ReLU)
        assert isinstance(activation.input._keras_history.operation, keras.layers.BatchNormalization)
    counts = [sum(int(np.prod(each.shape)) for each in one.trainable_variables) for one in (model, plain)]
    assert counts[0] == counts[1] + 2 * 64 - 2 * 16 - (2 * 32 - 2 * 16) - (2 * 64 - 2 * 32)
