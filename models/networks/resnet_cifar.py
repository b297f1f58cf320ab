"""ResNet for images of 32 x 32 pixels, such as CIFAR-10."""

import keras

from models.networks.blocks import Layers

DEPTHS = (2, 8, 20, 32, 44, 56, 110)
STAGE_CHANNELS = (16, 32, 64)


def resnet_cifar(
    images: keras.KerasTensor,
    *,
    classes: int,
    depth: int,
    width_factor: float,
    preactivation: bool,
    stem_stride: int,
    dropout: float,
    stochastic_depth: float,
    zero_init_residual: bool,
    dtype: str | None,
) -> keras.KerasTensor:
    """Map images `(batch, height, width, bands)` to float32 logits `(batch, classes)`.

    The network is a convolution and three stages of n basic blocks at full, half and quarter resolution: depth = 6n +
    2. Every shortcut is the identity. Where the shape changes, it takes every second pixel and adds channels of zeros.

        block(x) = relu(x + bn(conv(relu(bn(conv(x))))))
        block(x) = x + conv(relu(bn(conv(relu(bn(x))))))    with `preactivation`, and bn and relu before the mean

    In the first form, with `zero_init_residual`, each block starts as its shortcut.

    Args:
        images: Normalised images; no side may be shorter than 4 pixels times the stride of the stem.
        classes: Number of logits, at least 1.
        depth: Number of layers with weights: 20, 32, 44, 56 or 110 as published; 8 has one block per stage, 2 has none.
        width_factor: Scales every channel count, which is rounded to a multiple of 8 and is at least 8.
        preactivation: Whether normalisation and activation come before a convolution.
        stem_stride: Stride of the first convolution, 1 as published, or 2: every stage then has half the side.
        dropout: Rate of the dropout before the dense layer, in [0, 1); 0: none.
        stochastic_depth: Rate at which the last block is left out in training, in [0, 1); it falls linearly to the
            first block. 0: no block is.
        zero_init_residual: Whether the last normalisation of every block starts with gamma 0.
        dtype: Keras dtype policy of all layers up to the last mean, such as "mixed_bfloat16"; None: Keras's global one.

    Raises:
        ValueError: another depth, a width or number of classes that is not positive, or a rate out of range.

    Source: He et al. 2015 (deep residual learning), section 4.2 with shortcuts of option A; He et al. 2016 (identity
    mappings), figure 1b and appendix, for `preactivation`; Goyal et al. 2017, section 5.1, for gamma 0 and the
    normal(0.01) head.
    Differs: gamma 0, while the first source starts with 1; TensorFlow's "same" padding, which pads an even image at the
    bottom right first.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth must be one of {list(DEPTHS)}, got {depth}")
    block = _preactivated_block if preactivation else _basic_block
    blocks = (depth - 2) // 6
    layers = Layers(
        dtype,
        classes=classes,
        width_factor=width_factor,
        stochastic_depth=stochastic_depth,
        zero_init_residual=zero_init_residual,
        blocks=len(STAGE_CHANNELS) * blocks,
    )
    features = layers.convolution(images, layers.scaled(STAGE_CHANNELS[0]), 3, stride=stem_stride, name="stem_conv")
    if not preactivation:
        features = layers.activation(layers.normalisation(features, name="stem_bn"), name="stem_relu")
    for stage, channels in enumerate(STAGE_CHANNELS, start=1):
        for number in range(1, blocks + 1):
            stride = 2 if stage > 1 and number == 1 else 1
            features = block(layers, features, layers.scaled(channels), stride, f"stage{stage}_block{number}")
    if preactivation:
        features = layers.activation(layers.normalisation(features, name="last_bn"), name="last_relu")
    return layers.head(features, dropout=dropout)


def _basic_block(
    layers: Layers, features: keras.KerasTensor, channels: int, stride: int, name: str
) -> keras.KerasTensor:
    residual = layers.basic_residual(features, channels, stride=stride, name=name)
    joined = layers.add(_shortcut(layers, features, channels, stride, name), residual, name=f"{name}_add")
    return layers.activation(joined, name=f"{name}_relu")


def _preactivated_block(
    layers: Layers, features: keras.KerasTensor, channels: int, stride: int, name: str
) -> keras.KerasTensor:
    residual = layers.activation(layers.normalisation(features, name=f"{name}_bn1"), name=f"{name}_relu1")
    residual = layers.convolution(residual, channels, 3, stride=stride, name=f"{name}_conv1")
    residual = layers.activation(layers.normalisation(residual, name=f"{name}_bn2"), name=f"{name}_relu2")
    residual = layers.convolution(residual, channels, 3, name=f"{name}_conv2")
    return layers.add(_shortcut(layers, features, channels, stride, name), residual, name=f"{name}_add")


def _shortcut(layers: Layers, features: keras.KerasTensor, channels: int, stride: int, name: str) -> keras.KerasTensor:
    """Return the shortcut of option A: every second pixel if the stride is 2, and zeros for missing channels."""
    if stride > 1:
        # The largest of one pixel is a layer of Keras that takes every second pixel.
        features = keras.layers.MaxPooling2D(
            1, strides=stride, padding="same", dtype=layers.dtype, name=f"{name}_shortcut"
        )(features)
    missing = channels - features.shape[-1]
    return keras.ops.pad(features, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else features
