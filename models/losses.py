"""Losses from logits, one value per sample: the caller decides over which samples to average."""

from collections.abc import Callable

import tensorflow as tf

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def classification_loss(task: str) -> Loss:
    """Return `loss(targets, logits)`, both `(batch, classes)`, with values `(batch,)` in float32.

    "multi_label": mean over classes of -(t log sigmoid(z) + (1 - t) log(1 - sigmoid(z))).
    "single_label": -sum over classes of t log softmax(z), with one-hot (or smoothed) targets.

    Raises:
        ValueError: an unknown task.
    """
    if task not in _LOSSES:
        raise ValueError(f"task must be one of {sorted(_LOSSES)}, got {task!r}")
    return _LOSSES[task]


def _multi_label(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    targets, logits = tf.cast(targets, tf.float32), tf.cast(logits, tf.float32)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits), axis=-1)


def _single_label(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    targets, logits = tf.cast(targets, tf.float32), tf.cast(logits, tf.float32)
    return tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=logits)


_LOSSES: dict[str, Loss] = {"multi_label": _multi_label, "single_label": _single_label}
