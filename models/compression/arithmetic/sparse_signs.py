"""Messages that list places with a sign: their number depends on the data."""

import tensorflow as tf

from models.compression.arithmetic.bits import to_bytes
from models.compression.arithmetic.selection import with_signs, without_signs


def encode_signs(rows: tf.Tensor, places: tf.Tensor, positive: tf.Tensor, head: tf.Tensor) -> tf.RaggedTensor:
    """A row of bytes a part: `head`, then 4 bytes for each place.

    Args:
        rows: int32 `(entries,)`, rising: the part of each entry.
        places: int32 `(entries,)`.
        positive: Bool `(entries,)`.
        head: Float32 `(parts, numbers)`.
    """
    words = tf.reshape(tf.bitcast(with_signs(places, positive), tf.uint8), (-1,))
    lengths = 4 * tf.math.bincount(rows, minlength=head.shape[0], maxlength=head.shape[0], dtype=tf.int64)
    entries = tf.RaggedTensor.from_row_lengths(words, lengths, validate=False)  # they are our own
    return tf.concat([tf.RaggedTensor.from_tensor(to_bytes(head)), entries], 1) if head.shape[1] else entries


def decode_signs(message: tf.RaggedTensor, numbers: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Rows, places, whether positive, and the head, of what `encode_signs` gave with a head of so many numbers."""
    parts = message.nrows()
    head = tf.reshape(
        tf.bitcast(tf.reshape(message[:, : 4 * numbers].flat_values, (-1, numbers, 4)), tf.float32), (parts, numbers)
    )
    entries = message[:, 4 * numbers :]
    words = tf.bitcast(tf.reshape(entries.flat_values, (-1, 4)), tf.uint32)
    places, positive = without_signs(words)
    rows = tf.repeat(tf.range(tf.cast(parts, tf.int32)), tf.cast(entries.row_lengths(), tf.int32) // 4)
    return rows, places, positive, head
