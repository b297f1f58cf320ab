"""The network of seven convolutions of airbench94, which trains fast on images of 32 x 32 pixels."""

import keras
import numpy as np

from models.layers.drop import SeededDrop
from models.networks.blocks import Layers
from models.networks.whitening import whitening_convolution

STAGE_CHANNELS = (64, 256, 256)


def airbench(
    images: keras.KerasTensor, *, classes: int, width_factor: float, dropout: float, dtype: str | None
) -> keras.KerasTensor:
    """Map images `(batch, height, width, bands)` to float32 logits `(batch, classes)`.

    The network is a whitening convolution of 2 x 2 pixels and three stages without shortcuts. The stages are at half, a
    quarter and an eighth of the resolution:

        stage(x) = relu(bn(conv(relu(bn(max of 2 x 2 pixels(conv(x)))))))

    All other kernels are 3 x 3, and their first min(in, out) channels start as the identity. The logits are those of
    the largest value of each channel.

    Args:
        images: Normalised images; no side may be shorter than 9 pixels.
        classes: Number of logits, at least 1.
        width_factor: Scales the channel counts of the stages, which are rounded to a multiple of 8 and are at least 8.
        dropout: Rate of the dropout before the dense layer, in [0, 1); 0: none.
        dtype: Keras dtype policy of all layers up to the largest value, such as "mixed_bfloat16"; None: Keras's global
            one.

    Raises:
        ValueError: a width or number of classes that is not positive, or a rate out of range.

    Source: Jordan 2024, "94 % on CIFAR-10 in 3.29 seconds on a single GPU", sections 3.1 to 3.3, airbench94.
    Differs: ReLU instead of Jordan's GELU, which is slow on processors. Normalisation is as in our other networks,
    with a gain, epsilon 1e-5 and momentum 0.9. The whitening convolution has no bias. The largest value is over all
    remaining pixels, which are 3 x 3 for 32 x 32 as in the source.
    """
    layers = Layers(
        dtype,
        classes=classes,
        width_factor=width_factor,
        stochastic_depth=0.0,
        zero_init_residual=False,
        blocks=0,
    )
    features = layers.activation(whitening_convolution(images, 2, dtype=dtype), name="whitening_relu")
    for stage, published in enumerate(STAGE_CHANNELS, start=1):
        channels, name = layers.scaled(published), f"stage{stage}"
        features = _convolution(features, channels, f"{name}_conv1", dtype)
        features = keras.layers.MaxPooling2D(2, dtype=dtype, name=f"{name}_pool")(features)
        features = layers.activation(layers.normalisation(features, name=f"{name}_bn1"), name=f"{name}_relu1")
        features = _convolution(features, channels, f"{name}_conv2", dtype)
        features = layers.activation(layers.normalisation(features, name=f"{name}_bn2"), name=f"{name}_relu2")
    features = keras.layers.GlobalMaxPooling2D(dtype="float32", name="pool")(features)
    # The scaling precedes the dense layer: without bias the result is the same, and the logits keep their layer's name.
    features = keras.layers.Rescaling(1 / 9, dtype="float32", name="pool_scaled")(features)
    if dropout > 0:
        features = SeededDrop(dropout, 0, whole_samples=False, dtype="float32", name="dropout")(features)
    return keras.layers.Dense(
        classes, use_bias=False, kernel_initializer=_initializer(), dtype="float32", name="logits"
    )(features)


def _initializer() -> keras.initializers.Initializer:
    """Return a new initializer: an instance draws the same numbers each time for the same shape."""
    return keras.initializers.VarianceScaling(scale=1 / 3, mode="fan_in", distribution="uniform")


def _convolution(features: keras.KerasTensor, channels: int, name: str, dtype: str | None) -> keras.KerasTensor:
    layer = keras.layers.Conv2D(
        channels, 3, padding="same", use_bias=False, kernel_initializer=_initializer(), dtype=dtype, name=name
    )
    outputs = layer(features)
    # The kernels are set afterwards, not by our own initializer: the saved model then loads without this project.
    start = np.array(layer.kernel)
    same = np.arange(min(start.shape[2:]))
    start[:, :, :, same] = 0.0
    start[1, 1, same, same] = 1.0
    layer.kernel.assign(start)
    return outputs
