"""Half floats: 2 bytes an element."""

import tensorflow as tf


class Fp16Codec:
    """Round to the nearest half float, relative error up to 2**-11.

    Magnitudes above 65504 become infinite, those below 6e-8 vanish and those below 6e-5 lose digits.
    """

    name = "fp16"
    linear = True

    def encode(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor in float16."""
        return tf.cast(tensor, tf.float16)

    def decode(self, payload: tf.Tensor) -> tf.Tensor:
        """Return the payload in float32."""
        return tf.cast(payload, tf.float32)
