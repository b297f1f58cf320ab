"""Scaled sign with error feedback: one bit per element, one scale per tensor."""

from typing import Literal

import tensorflow as tf

from models.compression.arithmetic.bits import pack, spread
from models.compression.arithmetic.norms import euclidean_norm
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import ErrorFeedback, NoMemory
from models.compression.schemes.scatter_gather import Compressor, ScatterGather


def scaled_sign(*, error_feedback: bool) -> Codec:
    """Send Q(p) = mean(|p|) * sign(p), where the sign of 0 is +.

    |p - Q(p)|^2 = (1 - delta) |p|^2 with delta = |p|_1^2 / (n |p|_2^2).

    Args:
        error_feedback: Whether what was not sent is added to the next gradient. Without it training is biased: only
            for comparison.

    Source: Karimireddy et al. 2019, "Error feedback fixes SignSGD", algorithm 1.
    Differs: one scale for each rank's part of a tensor, because every part is encoded by itself.
    """
    return ScatterGather(
        "scaled_sign",
        ScaledSignQuantiser("mean"),
        ErrorFeedback() if error_feedback else NoMemory(),
        owner_feedback=error_feedback,
    )


class ScaledSignQuantiser(Compressor):
    """Sends packed signs, then the scale of each part.

        "mean":  mean(|p|), for which |p - Q(p)|^2 = |p|_2^2 - |p|_1^2 / n is smallest
        "norm":  |p|_2 / sqrt(n), for which |Q(p)|_2 = |p|_2, and |p - Q(p)|^2 = 2 |p|_2^2 - 2 |p|_2 |p|_1 / sqrt(n)

    Args:
        scale: "mean" or "norm".
    """

    def __init__(self, scale: Literal["mean", "norm"]) -> None:
        """Store the name of the scale."""
        self.scale = scale

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 1/8 byte per element and 4 bytes per part."""
        positive = parts >= 0
        count = tf.cast(tf.maximum(real, 1), tf.float32)[:, None]
        scale = _mean_magnitude(parts, count) if self.scale == "mean" else euclidean_norm(parts) / tf.sqrt(count)
        return (pack(tf.cast(positive, tf.uint8), 1), scale), parts - tf.where(positive, scale, -scale)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the scale with every element's sign."""
        bits, scale = message
        return tf.reshape(tf.where(spread(bits), scale[:, None], -scale[:, None]), (-1, *part_shape))


def _mean_magnitude(parts: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    # Elements are scaled before the sum, which could exceed float32's range. The sum of 8 runs is a vector operation,
    # unlike a sum along the axis.
    eighth = tf.add_n([tf.abs(run) * (1.0 / count) for run in tf.split(parts, 8, 1)])
    return tf.reduce_sum(eighth, 1, keepdims=True)
