"""Random-k: the same random elements on every rank, summed by an allreduce."""

import math
from collections.abc import Sequence

import tensorflow as tf

from models.compression.arithmetic.randomness import uniform
from models.compression.codec import Codec, CollectiveName, Context, Memory, Message, Shape, StateSpec
from models.compression.schemes.piecewise import density_by_step, elements_to_send


class RandomK(Codec):
    """Sends `density * n` elements: one at random from each of as many runs of the flattened tensor, 4 bytes each.

    Every rank draws the same places from a shared key, so that no place needs to be sent. With error feedback the
    elements are sent unchanged. Without it they are scaled by the length of their run, and the result is unbiased.

    Args:
        density: Part of all elements that is sent, in (0, 1].
        density_schedule: Pairs `(before_step, density)` for the first steps.
        error_feedback: Whether what was not sent is added to the next gradient.

    Raises:
        ValueError: a density out of range, or values of before_step that do not rise.

    Source: Wangni et al. 2018; Stich et al. 2018 (error feedback).
    Differs: one place is drawn per run, so that places are distinct.
    """

    name = "randomk"
    collectives: tuple[CollectiveName, ...] = ("allreduce",)

    def __init__(self, *, density: float, density_schedule: Sequence[tuple[int, float]], error_feedback: bool) -> None:
        """Store the settings."""
        self.density = density_by_step(density, density_schedule)
        self.error_feedback = error_feedback
        # XLA needs a payload whose length does not change with the step.
        self.compiled = self.density.constant

    def state_specs(self, shape: Shape, size: int, *, dense: bool) -> dict[str, StateSpec]:
        """Return the state: the residual."""
        return {"residual": StateSpec(shape, "worker")} if self.error_feedback and not dense else {}

    def phase(self, number: int, value: tf.Tensor, memory: Memory, context: Context) -> tuple[Message, Memory]:
        """Gather; scatter the sums."""
        places, lengths = self._draw(context)
        if number == 0:
            flat = tf.reshape(value, (-1,))
            if not self.error_feedback:
                return tf.gather(flat, places) * lengths, memory
            flat += context.residual_scale * tf.reshape(memory["residual"], (-1,))
            rest = tf.tensor_scatter_nd_update(flat, places[:, None], tf.zeros_like(lengths))
            return tf.gather(flat, places), {**memory, "residual": tf.reshape(rest, context.shape)}
        flat = tf.scatter_nd(places[:, None], value * (1.0 / context.size), [math.prod(context.shape)])
        return tf.reshape(flat, context.shape), memory

    def _draw(self, context: Context) -> tuple[tf.Tensor, tf.Tensor]:
        elements = math.prod(context.shape)
        count = elements_to_send(self.density, context.step, elements)
        most = max(1, round(max(self.density.values) * elements))
        # Run i is [i * n // k, (i + 1) * n // k).
        bounds = tf.cast(tf.range(count + 1, dtype=tf.int64) * elements // tf.cast(count, tf.int64), tf.int32)
        lengths = bounds[1:] - bounds[:-1]
        offsets = tf.cast(uniform((most,), context.key)[:count] * tf.cast(lengths, tf.float32), tf.int32)
        return bounds[:-1] + tf.minimum(offsets, lengths - 1), tf.cast(lengths, tf.float32)
