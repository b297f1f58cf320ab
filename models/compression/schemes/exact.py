"""Owners' messages without a second compression: the exact mean."""

import tensorflow as tf

from models.compression.arithmetic.selection import scatter_rows
from models.compression.codec import Message, Shape
from models.compression.schemes.stripes import Layout


class ExactFloats:
    """Sends every element in float32.

    Args:
        layout: Layout of the ranks' compressor.
    """

    compiled = True
    native = None

    def __init__(self, layout: Layout) -> None:
        """Store the layout."""
        self.layout = layout

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 4 bytes per element, and no remainder."""
        return (parts,), tf.zeros_like(parts)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the elements."""
        return message[0]


class ExactNonzeros:
    """Sends the elements that are not 0, for the mean of sparse messages.

    Args:
        layout: Layout of the ranks' compressor, with one axis.
    """

    compiled = False
    native = None

    def __init__(self, layout: Layout) -> None:
        """Store the layout."""
        self.layout = layout

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 8 bytes per element that is not 0, its place and its value, and no remainder."""
        entries = tf.where(parts != 0)
        places, values = tf.cast(entries[:, 1], tf.int32), tf.gather_nd(parts, entries)
        words = tf.concat([tf.bitcast(places, tf.uint8), tf.bitcast(values, tf.uint8)], 1)
        lengths = 8 * tf.math.count_nonzero(parts, 1, dtype=tf.int64)
        return tf.RaggedTensor.from_row_lengths(tf.reshape(words, (-1,)), lengths, validate=False), tf.zeros_like(parts)

    def decode(self, message: tf.RaggedTensor, part_shape: Shape) -> tf.Tensor:
        """Return the sent elements, zeros elsewhere."""
        words = tf.reshape(message.flat_values, (-1, 2, 4))
        places, values = tf.bitcast(words[:, 0], tf.int32), tf.bitcast(words[:, 1], tf.float32)
        rows = tf.repeat(tf.range(tf.cast(message.nrows(), tf.int32)), tf.cast(message.row_lengths(), tf.int32) // 8)
        return scatter_rows(rows, places, values, message.nrows(), part_shape[0])
