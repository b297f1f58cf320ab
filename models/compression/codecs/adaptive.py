"""Adaptive quantisation: a fixed part of the positive and of the negative elements, each sent as its mean."""

from collections.abc import Sequence

import tensorflow as tf

from models.compression.arithmetic.graph import fused
from models.compression.arithmetic.selection import (
    Size,
    decode_signs,
    encode_signs,
    gather_once,
    largest_of_each,
    scatter_rows,
    select_largest,
    subtract,
)
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import ErrorFeedback
from models.compression.schemes.piecewise import PiecewiseConstant, density_by_step, elements_to_send
from models.compression.schemes.scatter_gather import Compressor, ScatterGather
from models.compression.schemes.stripes import FlatLayout


def adaptive(*, density: float, density_schedule: Sequence[tuple[int, float]]) -> Codec:
    """Send the largest part `density` of the positive elements, and of the negative ones, as the mean of each sign.

    A message holds the two means and 4 bytes per sent element. Its sum is the sum of the elements that it stands for.

    Args:
        density: One over the paper's pi, in (0, 1].
        density_schedule: Pairs `(before_step, density)` for the first steps.

    Raises:
        ValueError: a density out of range, or values of before_step that do not rise.

    Source: Dryden et al. 2016, "Communication quantization for data-parallel training of deep neural networks".
    Differs: exact instead of sampled thresholds, for each rank's part of a tensor; two rounds instead of quantising
    again at every step of a ring.
    """
    return ScatterGather(
        "adaptive",
        AdaptiveQuantiser(density_by_step(density, density_schedule)),
        ErrorFeedback(),
        owner_feedback=True,
    )


class AdaptiveQuantiser(Compressor):
    """Sends the means of the positive and of the negative extremes, then their places with signs."""

    compiled = False

    def __init__(self, density: PiecewiseConstant) -> None:
        """Store the density as a function of the step."""
        self.density = density
        self.layout = FlatLayout(16)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 8 bytes per part and 4 per sent element."""
        counts = _count_signs(parts)
        upper, upper_sent = self._extremes(parts, tf.nn.relu, counts[0], step)
        lower, lower_sent = self._extremes(parts, _negative, counts[1], step)
        places = tf.concat([upper, lower], 1)
        sent = tf.concat([upper_sent, lower_sent], 1)
        means = tf.stack([_mean(parts, upper, upper_sent), _mean(parts, lower, lower_sent)], 1)
        entries = tf.cast(tf.where(sent), tf.int32)
        # The first columns are those of the positive elements.
        chosen, positive = tf.gather_nd(places, entries), entries[:, 1] < tf.shape(upper)[1]
        message = encode_signs(entries[:, 0], chosen, positive, means)
        return message, subtract(parts, entries[:, 0], chosen, _values(entries[:, 0], positive, means))

    def decode(self, message: tf.RaggedTensor, part_shape: Shape) -> tf.Tensor:
        """Return one of the two means for each sent element, zeros elsewhere."""
        rows, places, positive, means = decode_signs(message, 2)
        return scatter_rows(rows, places, _values(rows, positive, means), message.nrows(), part_shape[0])

    def _extremes(self, parts: tf.Tensor, size: Size, count: tf.Tensor, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return places of the elements of one sign that could be sent, and a mask of the sent ones."""
        # All elements could have this sign: as many places are selected as would be sent in that case.
        most = elements_to_send(self.density, step, parts.shape[1])
        density = self.density.pick(step, self.density.values)
        wanted = tf.cast(tf.math.ceil(density * tf.cast(count, tf.float32)), tf.int32)
        places = select_largest(parts, most, size)
        return places, largest_of_each(size(gather_once(parts, places)), tf.minimum(tf.minimum(wanted, count), most))


@fused
def _count_signs(parts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the number of positive and of negative elements of each part."""
    # XLA reads memory in order for the sum of 8 runs, but not for a sum along an axis.
    runs = tf.split(parts, 8, 1)
    positive, negative = (tf.add_n([tf.cast(sign * run > 0, tf.int32) for run in runs]) for sign in (1.0, -1.0))
    return tf.reduce_sum(positive, 1), tf.reduce_sum(negative, 1)


def _negative(values: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(-values)


def _values(rows: tf.Tensor, positive: tf.Tensor, means: tf.Tensor) -> tf.Tensor:
    return tf.where(positive, tf.gather(means[:, 0], rows), tf.gather(means[:, 1], rows))


def _mean(parts: tf.Tensor, places: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    count = tf.maximum(tf.reduce_sum(tf.cast(sent, tf.float32), 1, keepdims=True), 1.0)
    values = tf.where(sent, tf.gather(parts, places, batch_dims=1), 0.0)
    return tf.reduce_sum(values / count, 1)
