"""1-bit SGD: one bit an element, and two means a column."""

import tensorflow as tf

from models.compression.bits import from_bytes, pack, to_bytes, unpack
from models.compression.codec import Codec, Message, Shape
from models.compression.memory import ErrorFeedback, NoMemory
from models.compression.scatter_gather import ScatterGather
from models.compression.stripes import ColumnLayout


def onebit(*, error_feedback: bool = True) -> Codec:
    """The sign of every element, and for each column the means of its elements of either sign.

        Q(p) = mean of {p_i >= 0 in the column}  where p >= 0,  mean of {p_i < 0}  elsewhere

    The remainder sums to zero over each column, over each sign of it even. A tensor is the matrix of all but its last
    axis by its last: a column holds the weights into one output unit. Owners sum whole columns.

    Args:
        error_feedback: Without, training is biased and fails: for comparison only.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs", section 3.
    """
    memory = ErrorFeedback() if error_feedback else NoMemory()
    return ScatterGather("onebit", ColumnMeans(), memory, owner_feedback=error_feedback)


class ColumnMeans:
    """The quantiser: signs packed down the columns, then the means of positive and of negative elements."""

    compiled = True

    def __init__(self) -> None:
        """Take columns as they are."""
        self.layout = ColumnLayout()

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Rows / 8 + 8 bytes a column."""
        positive = parts >= 0
        rows = parts.shape[1]
        count = tf.reduce_sum(tf.cast(positive, tf.float32), 1, keepdims=True)
        upper = _mean(tf.where(positive, parts, 0.0), count)
        lower = _mean(tf.where(positive, 0.0, parts), rows - count)
        bits = tf.cast(positive, tf.uint8)
        if rows % 8:
            bits = tf.pad(bits, [[0, 0], [0, -rows % 8], [0, 0]])
        message = tf.concat([to_bytes(pack(bits, 1)), to_bytes(upper), to_bytes(lower)], 1)
        return message, parts - tf.where(positive, upper, lower)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """A mean an element."""
        rows, columns = part_shape
        packed_rows = -(-rows // 8)
        bits, upper, lower = tf.split(message, [packed_rows * columns, 4 * columns, 4 * columns], 1)
        positive = unpack(tf.reshape(bits, (-1, packed_rows, columns)), 1)[:, :rows] > 0
        return tf.where(
            positive, from_bytes(upper, tf.float32, (1, columns)), from_bytes(lower, tf.float32, (1, columns))
        )


def _mean(values: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    # Scaled before the sum, which could leave float32's range; an empty group has mean 0.
    return tf.reduce_sum(values * (1.0 / tf.maximum(count, 1.0)), 1, keepdims=True)
