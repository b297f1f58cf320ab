"""The number of floating-point operations of a network."""

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

    Only convolutions and dense layers are counted, also within wrappers and nested models: in a residual network the
    rest is about a hundredth. A layer that a model calls several times counts once.

    Args:
        model: A model of layers with known output shapes.

    Source: He et al. 2015, table 1, counts multiplications with their additions once: half of this.
    """
    return sum(layer_flops(layer) for layer in model.layers)


def layer_flops(operation: Any) -> int:
    """Count the operations of one layer or nested model, as `forward_flops` does; others count 0."""
    if isinstance(operation, keras.Model):
        return forward_flops(operation)
    layer = operation
    while isinstance(layer, keras.layers.Wrapper):  # the graph does not show the layer within a wrapper
        layer = layer.layer
    if isinstance(layer, keras.layers.Dense):
        return 2 * int(math.prod(layer.kernel.shape) * math.prod(operation.output.shape[1:-1]))
    if not isinstance(layer, _CONVOLUTIONS + _SEPARABLE + _TRANSPOSED):
        return 0
    kernels = (layer.depthwise_kernel, layer.pointwise_kernel) if isinstance(layer, _SEPARABLE) else (layer.kernel,)
    image = operation.input if isinstance(layer, _TRANSPOSED) else operation.output
    pixels = image.shape[2:] if layer.data_format == "channels_first" else image.shape[1:-1]
    return 2 * int(math.prod(pixels) * sum(math.prod(kernel.shape) for kernel in kernels))
