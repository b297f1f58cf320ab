"""1-bit SGD: one bit per element, and two means per column."""

import math
from typing import Any

import tensorflow as tf

from models.compression import kernels
from models.compression.arithmetic.bits import pack, spread
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import ErrorFeedback, NoMemory
from models.compression.schemes.scatter_gather import Compressor, ScatterGather
from models.compression.schemes.stripes import ColumnLayout


def onebit(*, error_feedback: bool) -> Codec:
    """Send the sign of every element, and for each column the mean of its elements of each sign.

        Q(p) = mean of {p_i >= 0 in the column}  where p >= 0,  mean of {p_i < 0}  elsewhere

    The remainder sums to zero over each column, and over the elements of each sign in a column. A tensor becomes a
    matrix of all but its last axis by its last axis: a column contains the weights of one output unit. Owners sum whole
    columns.

    Args:
        error_feedback: Whether what was not sent is added to the next gradient. Without it training is biased and
            fails: only for comparison.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs", section 3.
    """
    return ScatterGather(
        "onebit",
        OneBitQuantiser(),
        ErrorFeedback() if error_feedback else NoMemory(),
        owner_feedback=error_feedback,
    )


class OneBitQuantiser(Compressor):
    """Sends signs packed down the columns, then the means of the positive and of the negative elements."""

    def __init__(self) -> None:
        """Cut tensors between columns."""
        self.layout = ColumnLayout()
        operations = kernels.load()
        self.native = None if operations is None else NativeOneBitQuantiser(operations)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return rows / 8 + 8 bytes per column."""
        rows = parts.shape[1]
        padding = -rows % 8
        padded = tf.pad(parts, [[0, 0], [0, padding], [0, 0]]) if padding else parts
        bits = pack(tf.cast(padded >= 0, tf.uint8), 1)
        count = tf.reduce_sum(tf.cast(tf.raw_ops.PopulationCount(x=bits), tf.float32), 1, keepdims=True) - padding
        upper = _mean(tf.nn.relu(padded), count, rows)
        lower = -_mean(tf.nn.relu(-padded), rows - count, rows)
        return (bits, upper, lower), parts - tf.where(parts >= 0, upper, lower)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return for each element the mean of its sign and column."""
        rows, columns = part_shape
        bits, upper, lower = message
        runs = tf.where(spread(bits), upper[:, None], lower[:, None])
        return tf.reshape(runs, (-1, 8 * bits.shape[1], columns))[:, :rows]


class NativeOneBitQuantiser:
    """`OneBitQuantiser` in C++."""

    def __init__(self, operations: Any) -> None:
        """Store the operations."""
        self.operations = operations
        self.layout = ColumnLayout()

    def encode(
        self, term: tf.Tensor, residual: tf.Tensor | None, scale: tf.Tensor, parts: int, step: tf.Tensor
    ) -> tuple[Message, tf.Tensor, tf.Tensor]:
        """See `NativeCompressor`."""
        bits, upper, lower, remainder, finite = self.operations.groundswell_encode_columns(
            term, kernels.or_nothing(residual), scale, parts
        )
        rows, columns = self.layout.part_shape(tuple(term.shape), parts)
        message = (
            kernels.shaped(bits, (parts, -(-rows // 8), columns)),
            kernels.shaped(upper, (parts, 1, columns)),
            kernels.shaped(lower, (parts, 1, columns)),
        )
        return message, kernels.shaped(remainder, term.shape), kernels.shaped(finite, ())

    def clear(self, tensor: tf.Tensor, message: Message) -> tf.Tensor:
        """Return the tensor unchanged: elements are sent exactly only by chance."""
        return tensor

    def mean(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """See `NativeCompressor`."""
        return kernels.shaped(self.operations.groundswell_mean_columns(*message, part_shape[0]), part_shape)

    def decode(self, message: Message, shape: Shape) -> tf.Tensor:
        """See `NativeCompressor`."""
        rows = math.prod(shape[:-1])
        return tf.reshape(self.operations.groundswell_decode_columns(*message, rows, shape[-1]), shape)


def _mean(padded: tf.Tensor, count: tf.Tensor, rows: int) -> tf.Tensor:
    """Return the mean over `count` rows, if the other rows are zeros; 0 where the count is 0."""
    # The rows are scaled before the sum, which could exceed float32's range. XLA fuses the sum of eighths with the
    # operations before it, but not a sum along a whole axis.
    eighth = tf.add_n([run * (1.0 / rows) for run in tf.split(padded, 8, 1)])
    return tf.reduce_sum(eighth, 1, keepdims=True) * (rows / tf.maximum(count, 1.0))
