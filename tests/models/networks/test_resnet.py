"""Structure and initialisation of ResNets."""

import keras
import numpy as np
import pytest

from tests.models.built import layers_of, network_of


@pytest.fixture(scope="module")
def resnet50():
    return network_of("resnet", depth=50, width_factor=1.0, bands=12, classes=19)


def test_resnet50_has_the_parameters_of_the_paper(resnet50):
    # 25,557,032 of the three band, 1000 class original, with 9 more bands and another head.
    assert sum(int(np.prod(variable.shape)) for variable in resnet50.trainable_variables) == (
        25_557_032 + 7 * 7 * 9 * 64 - (2048 * 1000 + 1000) + (2048 * 19 + 19)
    )


@pytest.mark.parametrize(
    ("depth", "convolutions"),
    # One dense layer, `depth - 1` convolutions on the main path; a projection where the shape changes.
    [(18, 17 + 3), (34, 33 + 3), (50, 49 + 4)],
)
def test_depth_counts_the_layers_of_the_main_path(depth, convolutions):
    model = network_of("resnet", depth=depth, width_factor=0.125)
    assert (
        [layer.use_bias for layer in layers_of(model, keras.layers.Conv2D)],
        len(layers_of(model, keras.layers.BatchNormalization)),
    ) == ([False] * convolutions, convolutions)


def test_only_the_3x3_convolution_of_a_bottleneck_strides(resnet50):
    strided = {
        layer.name: (layer.kernel_size, layer.strides)
        for layer in layers_of(resnet50, keras.layers.Conv2D)
        if layer.strides != (1, 1)
    }
    assert strided == {
        "stem_conv": ((7, 7), (2, 2)),
        **{f"stage{stage}_block1_conv2": ((3, 3), (2, 2)) for stage in (2, 3, 4)},
        **{f"stage{stage}_block1_projection_conv": ((1, 1), (2, 2)) for stage in (2, 3, 4)},
    }
    assert resnet50.get_layer("stage4_block3_relu").output.shape == (None, 1, 1, 2048)  # 32 pixels / 32


def test_last_gain_of_each_block_starts_at_zero(resnet50):
    layers = layers_of(resnet50, keras.layers.BatchNormalization)
    zero = {layer.name for layer in layers if not np.any(layer.gamma)}
    assert zero == {f"stage{s}_block{b}_bn3" for s, n in enumerate((3, 4, 6, 3), start=1) for b in range(1, n + 1)}
    assert all(np.all(layer.gamma == 1) for layer in layers if layer.name not in zero)
    assert all((layer.momentum, layer.epsilon) == (0.9, 1e-5) for layer in layers)


def test_kernels_start_with_the_spread_of_fan_out_and_independent(resnet50):
    kernel = resnet50.get_layer("stage4_block2_conv2").kernel.numpy()
    # 512 outputs, 9 positions: sqrt(2 / 4608); 2.4 million draws know it to 0.05 %.
    assert kernel.std() == pytest.approx(np.sqrt(2 / (3 * 3 * 512)), rel=5e-3)
    assert np.abs(kernel).max() > 4 * kernel.std()  # not truncated
    assert not np.allclose(kernel, resnet50.get_layer("stage4_block3_conv2").kernel)
    head = resnet50.get_layer("logits")
    assert head.kernel.numpy().std() == pytest.approx(0.01, rel=0.03)
    assert not np.any(head.bias)


@pytest.mark.parametrize(
    ("width_factor", "channels"),
    [(0.25, (16, 32, 64, 128)), (0.3, (16, 40, 80, 152)), (0.01, (8, 8, 8, 8))],
)
def test_width_factor_scales_every_stage_to_multiples_of_8(width_factor, channels):
    # 0.3: 19.2, 38.4, 76.8 and 153.6 channels.
    model = network_of("resnet", width_factor=width_factor)
    names = ("stem_conv", *(f"stage{stage}_block2_conv2" for stage in range(1, 5)))
    assert [model.get_layer(name).filters for name in names] == [channels[0], *channels]
