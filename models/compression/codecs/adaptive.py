"""Adaptive quantisation: a fixed part of the positive and of the negative elements, each sent as its mean."""

from collections.abc import Sequence

import tensorflow as tf

from models.compression.arithmetic.graph import fused
from models.compression.arithmetic.selection import (
    Size,
    gather_once,
    largest_of_each,
    scatter_rows,
    select_largest,
    subtract,
)
from models.compression.arithmetic.sparse_signs import decode_signs, encode_signs
from models.compression.codec import Codec, Message, Shape
from models.compression.codecs.topk import density_stages
from models.compression.schemes.memory import ErrorFeedback
from models.compression.schemes.scatter_gather import ScatterGather
from models.compression.schemes.stages import Stages
from models.compression.schemes.stripes import FlatLayout


def adaptive(*, density: float = 0.01, stages: Sequence[tuple[int, float]] = ()) -> Codec:
    """Of the positive elements the largest part `density`, of the negative ones likewise, and the means of both.

    Sends the two means and 4 bytes an element. What is sent has the sum of the elements that it stands for.

    Args:
        density: One over the paper's pi, in (0, 1].
        stages: `(before_step, density)` for the first steps.

    Raises:
        ValueError: a density out of range, stages whose bounds do not rise.

    Source: Dryden et al. 2016, "Communication quantization for data-parallel training of deep neural networks".
    Differs: exact instead of sampled thresholds, for each rank's part of a tensor; two stages instead of quantising
    again at every step of a ring.
    """
    return ScatterGather("adaptive", Extremes(density_stages(density, stages)), ErrorFeedback(), owner_feedback=True)


class Extremes:
    """The quantiser: the means of positive and negative extremes, then places with their signs."""

    compiled = False
    native = None

    def __init__(self, density: Stages) -> None:
        """Keep the density by step."""
        self.density = density
        self.layout = FlatLayout(16)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """8 bytes a part, 4 an element that is sent."""
        counts = _count_signs(parts)
        upper, upper_kept = self._extremes(parts, tf.nn.relu, counts[0], step)
        lower, lower_kept = self._extremes(parts, _negative, counts[1], step)
        places = tf.concat([upper, lower], 1)
        kept = tf.concat([upper_kept, lower_kept], 1)
        means = tf.stack([_mean(parts, upper, upper_kept), _mean(parts, lower, lower_kept)], 1)
        signs = tf.concat([tf.ones_like(upper_kept), tf.zeros_like(lower_kept)], 1)
        entries = tf.cast(tf.where(kept), tf.int32)
        chosen, positive = tf.gather_nd(places, entries), tf.gather_nd(signs, entries)
        message = encode_signs(entries[:, 0], chosen, positive, means)
        return message, subtract(parts, entries[:, 0], chosen, _values(entries[:, 0], positive, means))

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """One of two means."""
        rows, places, positive, means = decode_signs(message, 2)
        return scatter_rows(rows, places, _values(rows, positive, means), message.nrows(), part_shape[0])

    def _extremes(self, parts: tf.Tensor, size: Size, count: tf.Tensor, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Places of as many elements of a sign as could be sent, and which of them are."""
        # All could have this sign: their places are selected, as many as then would be sent.
        most = self.density.pick(step, [max(1, round(value * parts.shape[1])) for value in self.density.values])
        density = tf.gather(tf.constant(self.density.values), self.density.pick(step, range(len(self.density.values))))
        wanted = tf.cast(tf.math.ceil(density * tf.cast(count, tf.float32)), tf.int32)
        places = select_largest(parts, most, size)
        return places, largest_of_each(size(gather_once(parts, places)), tf.minimum(tf.minimum(wanted, count), most))


@fused
def _count_signs(parts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """How many elements of each part are positive, and negative."""
    # XLA reads memory in order for the sum of 8 runs, but not for that along an axis.
    runs = tf.split(parts, 8, 1)
    positive, negative = (tf.add_n([tf.cast(sign * run > 0, tf.int32) for run in runs]) for sign in (1.0, -1.0))
    return tf.reduce_sum(positive, 1), tf.reduce_sum(negative, 1)


def _negative(values: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(-values)


def _values(rows: tf.Tensor, positive: tf.Tensor, means: tf.Tensor) -> tf.Tensor:
    return tf.where(positive, tf.gather(means[:, 0], rows), tf.gather(means[:, 1], rows))


def _mean(parts: tf.Tensor, places: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    count = tf.maximum(tf.reduce_sum(tf.cast(kept, tf.float32), 1, keepdims=True), 1.0)
    values = tf.where(kept, tf.gather(parts, places, batch_dims=1), 0.0)
    return tf.reduce_sum(values / count, 1)
