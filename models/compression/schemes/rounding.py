"""Quantisation to shorter floating-point numbers."""

import tensorflow as tf

from models.compression.codec import Message, Shape
from models.compression.schemes.stripes import FlatLayout


class RoundingQuantiser:
    """Rounds to the nearest number of another floating-point type.

    Args:
        dtype: tf.float16 or tf.bfloat16.
        prescale: Multiplies before the rounding and is divided out after it.
    """

    compiled = True
    native = None

    def __init__(self, dtype: tf.DType, prescale: float) -> None:
        """Store the settings."""
        self.dtype, self.prescale = dtype, prescale
        self.layout = FlatLayout(1)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return the rounded numbers, 2 bytes per element, and the rounding errors."""
        rounded = tf.cast(parts * self.prescale, self.dtype)
        return (rounded,), parts - self._restore(rounded)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the numbers in float32."""
        return self._restore(message[0])

    def _restore(self, rounded: tf.Tensor) -> tf.Tensor:
        return tf.cast(rounded, tf.float32) * (1 / self.prescale)
