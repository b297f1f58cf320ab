"""Batch normalisation as one kernel: without it Keras spends a quarter of a ResNet's training step on a CPU."""

from typing import Any

import keras
import tensorflow as tf

from models.layers.drop import SeededDrop


@keras.saving.register_keras_serializable(package="groundswell")
class FusedBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """`keras.layers.BatchNormalization` of `(batch, height, width, channels)`, in TensorFlow's fused kernel.

        y = gamma * (x - mean) / sqrt(variance + epsilon) + beta
        moving = momentum * moving + (1 - momentum) * batch's

    It has the arguments, weights and results of Keras's layer, which a saved model holds instead: see
    `plain_layers`.

    Source: Ioffe, Szegedy 2015, algorithm 1.
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalise by the batch's statistics in training; by the moving ones otherwise, and if the layer is frozen."""
        if mask is not None or len(inputs.shape) != 4:
            return super().call(inputs, training=training, mask=mask)
        learning = bool(training) and self.trainable
        nothing = tf.zeros([0], tf.float32)
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=tf.cast(self.gamma, tf.float32),
            offset=tf.cast(self.beta, tf.float32),
            mean=nothing if learning else tf.cast(self.moving_mean, tf.float32),
            variance=nothing if learning else tf.cast(self.moving_variance, tf.float32),
            epsilon=self.epsilon,
            is_training=learning,
        )
        if learning:
            # The kernel returns the unbiased variance, n / (n - 1) times the one that Keras averages.
            count = tf.cast(tf.size(inputs) // tf.shape(inputs)[-1], tf.float32)
            self._move(self.moving_mean, mean)
            self._move(self.moving_variance, variance * (count - 1.0) / count)
        return outputs

    def _move(self, moving: Any, batch: Any) -> None:
        moving.assign(self.momentum * moving + (1.0 - self.momentum) * tf.cast(batch, moving.dtype))


def plain_layers(model: keras.Model) -> keras.Model:
    """Return a copy of `model` with equal weights, whose layers are Keras's own and compute in float32."""

    def plain(layer: keras.layers.Layer) -> keras.layers.Layer:
        if isinstance(layer, SeededDrop):
            return layer.plain()
        kind = keras.layers.BatchNormalization if isinstance(layer, FusedBatchNormalization) else type(layer)
        config = layer.get_config()
        policy = getattr(layer, "dtype_policy", None)  # operations without variables have none
        if policy is not None and policy.name.startswith("mixed_"):
            config["dtype"] = "float32"
        return kind.from_config(config)

    # Recursive: an imported network may be a model in the model.
    copy = keras.models.clone_model(model, clone_function=plain, recursive=True)
    copy.set_weights(model.get_weights())
    return copy
