"""How many floating-point operations a network needs."""

import math
from collections.abc import Iterator

import keras

_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
)


def forward_flops(model: keras.Model) -> int:
    """Count the operations of one sample's forward pass, 2 for each multiplication with its addition.

        convolution: 2 * output pixels * elements of the kernel
        dense layer: 2 * outputs * inputs

    Convolutions and dense layers are counted, also within nested models, and nothing else: in a residual network the
    rest is about a hundredth. Layers that a model calls several times count once.

    Args:
        model: Made of layers whose output shapes are known.

    Source: He et al. 2015, table 1, counts multiplications with their additions once: half of this.
    """
    return sum(_flops_of(layer) for layer in _layers(model))


def _layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _layers(layer)
        else:
            yield layer


def _flops_of(layer: keras.layers.Layer) -> int:
    if isinstance(layer, keras.layers.Dense):
        return 2 * int(math.prod(layer.kernel.shape) * math.prod(layer.output.shape[1:-1]))
    if not isinstance(layer, _CONVOLUTIONS):
        return 0
    channels_first = layer.data_format == "channels_first"
    pixels = math.prod(layer.output.shape[2:] if channels_first else layer.output.shape[1:-1])
    return 2 * int(pixels * math.prod(layer.kernel.shape))
