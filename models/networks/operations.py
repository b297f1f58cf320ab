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
_SEPARABLE = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
_TRANSPOSED = (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose)


def forward_flops(model: keras.Model) -> int:
    """Count the operations of one sample's forward pass, 2 for each multiplication with its addition.

        convolution: 2 * output pixels * elements of the kernel, of both kernels of a separable one
        transposed convolution: 2 * input pixels * elements of the kernel
        dense layer: 2 * outputs * inputs

    Convolutions and dense layers are counted, also within wrappers and nested models, and nothing else: in a residual
    network the rest is about a hundredth. Layers that a model calls several times count once.

    Args:
        model: Made of layers whose output shapes are known.

    Source: He et al. 2015, table 1, counts multiplications with their additions once: half of this.
    """
    return sum(layer_flops(layer) for layer in model.layers)


def layer_flops(operation: Any) -> int:
    """Count those of one layer, or of a nested model, as `forward_flops` does; 0 for any other operation."""
    if isinstance(operation, keras.Model):
        return forward_flops(operation)
    layer = operation
    while isinstance(layer, keras.layers.Wrapper):  # a layer within it has no place in the graph
        layer = layer.layer
    if isinstance(layer, keras.layers.Dense):
        return 2 * int(math.prod(layer.kernel.shape) * math.prod(operation.output.shape[1:-1]))
    if isinstance(layer, _TRANSPOSED):
        return 2 * _pixels(layer, operation.input) * int(math.prod(layer.kernel.shape))
    if isinstance(layer, _SEPARABLE):
        weights = int(math.prod(layer.depthwise_kernel.shape) + math.prod(layer.pointwise_kernel.shape))
        return 2 * _pixels(layer, operation.output) * weights
    if isinstance(layer, _CONVOLUTIONS):
        return 2 * _pixels(layer, operation.output) * int(math.prod(layer.kernel.shape))
    return 0


def _pixels(layer: Any, image: Any) -> int:
    return int(math.prod(image.shape[2:] if layer.data_format == "channels_first" else image.shape[1:-1]))
