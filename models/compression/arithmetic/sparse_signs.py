"""Messages that list places with a sign; the length depends on the data."""

import tensorflow as tf

from models.compression.arithmetic.bits import to_bytes
from models.compression.arithmetic.selection import with_signs, without_signs


def encode_signs(rows: tf.Tensor, places: tf.Tensor, positive: tf.Tensor, head: tf.Tensor) -> tf.RaggedTensor:
    """Return one row of bytes per part: `head`, then 4 bytes per entry.

    Args:
        rows: The part of each entry, int32 `(entries,)`, in rising order.
        places: The place of each entry in its part, int32 `(entries,)`.
        positive: The sign of each entry, bool `(entries,)`.
        head: Numbers sent for each part, float32 `(parts, numbers)`.
    """
    words = tf.reshape(tf.bitcast(with_signs(places, positive), tf.uint8), (-1,))
    lengths = 4 * tf.math.bincount(rows, minlength=head.shape[0], maxlength=head.shape[0], dtype=tf.int64)
    entries = tf.RaggedTensor.from_row_lengths(words, lengths, validate=False)
    return tf.concat([tf.RaggedTensor.from_tensor(to_bytes(head)), entries], 1) if head.shape[1] else entries


def decode_signs(message: tf.RaggedTensor, numbers: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return rows, places, signs and head from a message of `encode_signs` whose head has `numbers` columns."""
    parts = message.nrows()
    head = tf.reshape(
        tf.bitcast(tf.reshape(message[:, : 4 * numbers].flat_values, (-1, numbers, 4)), tf.float32), (parts, numbers)
    )
    entries = message[:, 4 * numbers :]
    words = tf.bitcast(tf.reshape(entries.flat_values, (-1, 4)), tf.uint32)
    places, positive = without_signs(words)
    rows = tf.repeat(tf.range(tf.cast(parts, tf.int32)), tf.cast(entries.row_lengths(), tf.int32) // 4)
    return rows, places, positive, head
