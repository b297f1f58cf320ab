"""Losses from logits, one value per sample: the caller decides over which samples to average."""

from collections.abc import Callable

import tensorflow as tf

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def classification_loss(task: str, *, label_smoothing: float = 0.0) -> Loss:
    """Return `loss(targets, logits)`, both `(batch, classes)`, with values `(batch,)` in float32.

    "multi_label": mean over classes of -(t log sigmoid(z) + (1 - t) log(1 - sigmoid(z))).
    "single_label": -sum over classes of t log softmax(z), with targets whose sum is 1.

    Args:
        task: "multi_label" or "single_label".
        label_smoothing: Part a of the targets, in [0, 1), that is spread over the possible answers before the loss is
            computed: t = (1 - a) t + a / 2 for each class of "multi_label", and t = (1 - a) t + a / classes for
            "single_label".

    Raises:
        ValueError: an unknown task, or a part out of range.

    Source: Szegedy et al. 2016, "Rethinking the Inception architecture", section 7; for several labels the same with
    two answers per class, as Keras's `BinaryCrossentropy` has it.
    """
    if task not in _LOSSES:
        raise ValueError(f"task must be one of {sorted(_LOSSES)}, got {task!r}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    loss = _LOSSES[task]
    if label_smoothing == 0:
        return loss

    def smoothed(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        targets = tf.cast(targets, tf.float32)
        answers = 2 if task == "multi_label" else targets.shape[-1]
        return loss((1.0 - label_smoothing) * targets + label_smoothing / answers, logits)

    return smoothed


def _multi_label(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    targets, logits = tf.cast(targets, tf.float32), tf.cast(logits, tf.float32)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits), axis=-1)


def _single_label(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    targets, logits = tf.cast(targets, tf.float32), tf.cast(logits, tf.float32)
    return tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=logits)


_LOSSES: dict[str, Loss] = {"multi_label": _multi_label, "single_label": _single_label}
