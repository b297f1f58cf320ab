"""How many floating-point operations a network needs."""

import math
from typing import Any

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
    return sum(layer_flops(layer) for layer in model.layers)


def layer_flops(operation: Any) -> int:
    """Count those of one layer, or of a nested model, as `forward_flops` does; 0 for any other operation."""
    if isinstance(operation, keras.Model):
        return forward_flops(operation)
    if isinstance(operation, keras.layers.Dense):
        return 2 * int(math.prod(operation.kernel.shape) * math.prod(operation.output.shape[1:-1]))
    if not isinstance(operation, _CONVOLUTIONS):
        return 0
    channels_first = operation.data_format == "channels_first"
    pixels = math.prod(operation.output.shape[2:] if channels_first else operation.output.shape[1:-1])
    return 2 * int(pixels * math.prod(operation.kernel.shape))
