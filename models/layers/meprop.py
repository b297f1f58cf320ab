"""meProp: back-propagation of only the largest elements of a layer's output gradient."""

from typing import TYPE_CHECKING, Any

import keras

from models.layers.backend import ON_TENSORFLOW, require_tensorflow

if TYPE_CHECKING or ON_TENSORFLOW:
    import tensorflow as tf


@keras.saving.register_keras_serializable(package="groundswell")
class MeProp(keras.layers.Wrapper):  # type: ignore[misc]
    """Wraps a layer: its backward pass uses only the `k` largest elements of its output's gradient.

        y = layer(x)
        dy' = dy where |dy| is among the k largest over the last axis, 0 elsewhere
        dW = x^T dy',  dx = dy' W^T

    The forward pass is unchanged. For a dense layer, dW then has at most k non-zero columns per example, or per
    minibatch if the choice is unified. If k is the number of units, nothing changes. The gradient is biased, and there
    is no error feedback.

    Args:
        layer: Usually dense; `k` counts along the last axis of its output.
        k: Number of elements to keep, at least 1.
        unified: Whether the whole minibatch shares the chosen units, by the sum of |dy| over all but the last axis.
        **kwargs: Arguments of any Keras layer.

    Raises:
        ValueError: k below 1, or, when called, above the number of units.

    Source: Sun et al. 2017, "meProp: sparsified back propagation", section 3; unified: their later report.
    """

    def __init__(self, layer: keras.Layer, k: int, unified: bool = False, **kwargs: Any) -> None:
        """Store the settings."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        super().__init__(layer, **kwargs)
        self.k, self.unified = k, unified

    def call(self, inputs: Any, **kwargs: Any) -> Any:
        """Return the layer's output."""
        outputs = self.layer(inputs, **kwargs)
        if self.k > outputs.shape[-1]:
            raise ValueError(f"k={self.k} is more than the {outputs.shape[-1]} units of layer {self.layer.name!r}")
        return keep_largest_gradients(outputs, self.k, unified=self.unified)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the layer's output."""
        return self.layer.compute_output_shape(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`."""
        return {**super().get_config(), "k": self.k, "unified": self.unified}


def keep_largest_gradients(outputs: "tf.Tensor", k: int, *, unified: bool) -> "tf.Tensor":
    """Return `outputs`, with a gradient that keeps the k largest elements along the last axis; of equals, the first.

    Raises:
        ValueError: Keras's backend is not TensorFlow.
    """
    require_tensorflow("meProp")

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(values: "tf.Tensor") -> Any:
        def gradient(upstream: "tf.Tensor") -> "tf.Tensor":
            scores = tf.abs(upstream)
            if unified:
                scores = tf.reduce_sum(scores, range(len(upstream.shape) - 1), keepdims=True)
            largest = tf.reduce_sum(tf.one_hot(tf.math.top_k(scores, k).indices, upstream.shape[-1]), -2)
            return upstream * tf.cast(largest, upstream.dtype)

        return tf.identity(values), gradient

    return identity(outputs)
