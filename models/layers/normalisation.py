"""Batch normalisation as one kernel; Keras's own takes a quarter of a ResNet's training step on a CPU."""

import functools
from typing import TYPE_CHECKING, Any

import keras

from models.layers.backend import ON_TENSORFLOW, require_tensorflow
from models.layers.drop import SeededDrop
from models.layers.resolution import TrainingResolution

if TYPE_CHECKING or ON_TENSORFLOW:
    import tensorflow as tf

    from models.layers import batch_statistics
    from models.layers.batch_statistics import RankGroup


@keras.saving.register_keras_serializable(package="groundswell")
class FusedBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """`keras.layers.BatchNormalization` over the last axis, for `(batch, height, width, channels)` in a fused kernel.

        y = gamma * (x - mean) / sqrt(variance + epsilon) + beta
        moving = momentum * moving + (1 - momentum) * batch's

    It has the arguments, weights and results of Keras's layer, which replaces it in a saved model: see `plain_layers`.
    The fused kernel is TensorFlow's: on another backend of Keras, and for other shapes, Keras's own layer computes.

    Source: Ioffe, Szegedy 2015, algorithm 1.
    """

    _group: "RankGroup | None" = None
    _sum_name = ""

    def normalise_over(self, group: "RankGroup | None", name: str) -> None:
        """Take the training statistics over the batches of a group of ranks; None: over this rank's batch only.

        Args:
            group: The ranks.
            name: Name with which the ranks match their sums: the same on all ranks, and different for every layer.
        """
        self._group, self._sum_name = group, name

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalise with the batch's statistics in training; otherwise, or if frozen, with the moving ones."""
        learning = bool(training) and self.trainable
        if learning and self._group is not None:
            if mask is not None:
                raise ValueError(f"{self.name} cannot normalise over ranks with a mask")
            if len(inputs.shape) == 4:
                return self._normalise_fused(inputs, learning)
            pixels = tf.reshape(inputs, (-1, 1, 1, inputs.shape[-1]))
            return tf.ensure_shape(tf.reshape(self._normalise_fused(pixels, learning), tf.shape(inputs)), inputs.shape)
        if not ON_TENSORFLOW or mask is not None or len(inputs.shape) != 4 or not (self.scale and self.center):
            return super().call(inputs, training=training, mask=mask)
        return self._normalise_fused(inputs, learning)

    def _normalise_fused(self, images: Any, learning: bool) -> Any:
        channels = images.shape[-1]
        gamma = tf.cast(self.gamma, tf.float32) if self.scale else tf.ones(channels)
        beta = tf.cast(self.beta, tf.float32) if self.center else tf.zeros(channels)
        moving_mean = tf.cast(self.moving_mean, tf.float32)
        if not learning:
            moving_variance = tf.cast(self.moving_variance, tf.float32)
            return batch_statistics.normalise_by(images, gamma, beta, moving_mean, moving_variance, self.epsilon)
        if self._group is None:
            outputs, mean, variance = batch_statistics.normalise_by_batch(images, gamma, beta, self.epsilon)
        else:
            outputs, mean, variance = batch_statistics.normalise_over_ranks(
                images, gamma, beta, moving_mean, self.epsilon, self._group, self._sum_name
            )
        for moving, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign(self.momentum * moving + (1.0 - self.momentum) * tf.cast(batch, moving.dtype))
        return outputs


def normalise_over(model: keras.Model, group: "RankGroup") -> None:
    """Make every batch norm of a model take its statistics, and their gradients, over the batches of a group of ranks.

    k ranks with batch b then normalise as one rank with batch k * b. Every rank of the group must call this for the
    same model before a training step is compiled. All ranks run the same sums in every training step.

    Args:
        model: A model of a network of this package, or with `FusedBatchNormalization`.
        group: The ranks; TensorFlow only.

    Raises:
        ValueError: As `batch_norms_over_ranks`; or Keras's backend is not TensorFlow.
    """
    require_tensorflow("batch norm over ranks")
    for number, layer in enumerate(batch_norms_over_ranks(model)):
        layer.normalise_over(group, f"batch_norm_{number}")


def batch_norms_over_ranks(model: keras.Model) -> list[FusedBatchNormalization]:
    """Return all batch norms of a model, in its order.

    Raises:
        ValueError: There is no batch norm, or one is Keras's own layer, which has no group of ranks.
    """
    layers = _batch_norms(model)
    foreign = [layer.name for layer in layers if not isinstance(layer, FusedBatchNormalization)]
    if foreign or not layers:
        what = f"its layer {foreign[0]} is Keras's own" if foreign else "it has no such layer"
        raise ValueError(
            f"{model.name} cannot take its batch norm over ranks, {what}: use "
            "models.layers.normalisation.FusedBatchNormalization in the network"
        )
    return layers


def statistics_bytes(model: keras.Model) -> int:
    """Return the payload that batch norm over ranks adds per rank and micro-batch, in bytes of an allreduce.

        4 * (2 C + 1) forward and 4 * 2 C backward, summed over the layers of C channels

    Frozen layers add nothing. For ResNet-50 the payload is 425 kB, 0.45 % of its float32 gradients.
    """
    return sum(4 * (4 * layer.moving_mean.shape[0] + 1) for layer in _batch_norms(model) if layer.trainable)


def plain_layers(model: keras.Model) -> keras.Model:
    """Return a copy of `model` with equal weights, whose layers are Keras's own and compute in float32."""
    half = {
        layer.dtype_policy.compute_dtype
        for layer in model._flatten_layers()
        if layer.dtype_policy.name.startswith("mixed_")
    }

    @functools.cache  # a layer that is used twice stays one layer
    def plain(layer: keras.layers.Layer) -> keras.layers.Layer:
        # An imported network may be a model in the model; `clone_model` of Keras 3.2 has no argument `recursive`.
        if isinstance(layer, keras.Sequential) or (isinstance(layer, keras.Model) and hasattr(layer, "operations")):
            return keras.models.clone_model(layer, clone_function=plain)
        if isinstance(layer, SeededDrop | TrainingResolution):
            return layer.plain()
        kind = keras.layers.BatchNormalization if isinstance(layer, FusedBatchNormalization) else type(layer)
        config = _of_float32(layer.get_config())
        if isinstance(layer, keras.layers.Wrapper):
            config["layer"] = keras.saving.serialize_keras_object(plain(layer.layer))
        policy = getattr(layer, "dtype_policy", None)
        # Operations without variables have no policy. Keras 3.5 makes such operations of the casts before a layer in
        # half precision.
        is_half = config.get("dtype") in half if policy is None else policy.name.startswith("mixed_")
        if is_half:
            config["dtype"] = "float32"
        return kind.from_config(config)

    copy = keras.models.clone_model(model, clone_function=plain)
    copy.set_weights(model.get_weights())
    return copy


def _of_float32(config: Any) -> Any:
    """Return a layer's configuration with float32 for the layers in it, such as the cell of a recurrent layer."""
    if isinstance(config, list | tuple):
        return type(config)(_of_float32(each) for each in config)
    if not isinstance(config, dict):
        return config
    if config.get("class_name") == "DTypePolicy" and config["config"]["name"].startswith("mixed_"):
        return "float32"
    return {key: _of_float32(value) for key, value in config.items()}


def _batch_norms(model: keras.Model) -> list[Any]:
    # Keras has no public list of all layers, nested ones included.
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
