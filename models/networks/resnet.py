"""ResNet v1.5 with the initialisation of large-batch training."""

import keras

from models.networks.blocks import Layers

BLOCKS_PER_STAGE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
STAGE_CHANNELS = (64, 128, 256, 512)


def resnet(
    images: keras.KerasTensor,
    *,
    classes: int,
    depth: int,
    width_factor: float,
    dropout: float,
    stochastic_depth: float,
    zero_init_residual: bool,
    dtype: str | None,
) -> keras.KerasTensor:
    """Map images `(batch, height, width, bands)` to float32 logits `(batch, classes)`.

    Depths 18 and 34 have basic blocks, larger depths bottlenecks. There is a projection shortcut only where the shape
    changes. With `zero_init_residual` each block starts as its shortcut.

    Args:
        images: Normalised images.
        classes: Number of logits, at least 1.
        depth: Number of layers with weights: 18, 34, 50, 101 or 152.
        width_factor: Scales every channel count, which is rounded to a multiple of 8 and is at least 8.
        dropout: Rate of the dropout before the dense layer, in [0, 1); 0: none.
        stochastic_depth: Rate at which the last block is left out in training, in [0, 1); it falls linearly to the
            first block. 0: no block is.
        zero_init_residual: Whether the last normalisation of every block starts with gamma 0.
        dtype: Keras dtype policy of all layers up to the last mean, such as "mixed_bfloat16"; None: Keras's global one.

    Raises:
        ValueError: another depth, a width or number of classes that is not positive, or a rate out of range.

    Source: He et al. 2015, table 1; Goyal et al. 2017, section 5.1, for the stride in the 3x3 convolution ("v1.5"),
    gamma 0 and the normal(0.01) head; He et al. 2015 (fan out) for the convolution kernels.
    Differs: TensorFlow's "same" padding, which pads an even image at the bottom right first.
    """
    if depth not in BLOCKS_PER_STAGE:
        raise ValueError(f"depth must be one of {sorted(BLOCKS_PER_STAGE)}, got {depth}")
    layers = Layers(
        dtype,
        classes=classes,
        width_factor=width_factor,
        stochastic_depth=stochastic_depth,
        zero_init_residual=zero_init_residual,
        blocks=sum(BLOCKS_PER_STAGE[depth]),
    )
    residual_of = layers.bottleneck_residual if depth >= 50 else layers.basic_residual
    features = layers.convolved(images, layers.scaled(STAGE_CHANNELS[0]), 7, stride=2, name="stem")
    features = keras.layers.MaxPooling2D(3, strides=2, padding="same", dtype=dtype, name="stem_pool")(features)
    for stage, (channels, blocks) in enumerate(zip(STAGE_CHANNELS, BLOCKS_PER_STAGE[depth], strict=True), start=1):
        for number in range(1, blocks + 1):
            name = f"stage{stage}_block{number}"
            stride = 2 if stage > 1 and number == 1 else 1
            residual = residual_of(features, layers.scaled(channels), stride=stride, name=name)
            features = _joined(layers, features, residual, stride, name)
    return layers.head(features, dropout=dropout)


def _joined(
    layers: Layers, shortcut: keras.KerasTensor, residual: keras.KerasTensor, stride: int, name: str
) -> keras.KerasTensor:
    channels = residual.shape[-1]
    if stride > 1 or shortcut.shape[-1] != channels:
        shortcut = layers.convolution(shortcut, channels, 1, stride=stride, name=f"{name}_projection_conv")
        shortcut = layers.normalisation(shortcut, name=f"{name}_projection_bn")
    return layers.activation(layers.add(shortcut, residual, name=f"{name}_add"), name=f"{name}_relu")
