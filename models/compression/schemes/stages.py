"""Densities and ranks as functions of the step."""

from collections.abc import Sequence

import tensorflow as tf


class Stages:
    """A value for the first steps, another for those after, and so on.

    Args:
        final: From the last bound on.
        stages: `(before_step, value)`, bounds rising: the value up to that step, exclusive.

    Raises:
        ValueError: bounds that do not rise.
    """

    def __init__(self, final: float, stages: Sequence[tuple[int, float]] = ()) -> None:
        """Keep the stages; see the class."""
        bounds = [bound for bound, _ in stages]
        if bounds != sorted(set(bounds)) or (bounds and bounds[0] < 1):
            raise ValueError(f"stages must have rising bounds of 1 and more, got before_step {bounds}")
        self.final = final
        self.stages = tuple(stages)

    @property
    def values(self) -> tuple[float, ...]:
        """All values, in order."""
        return (*[value for _, value in self.stages], self.final)

    @property
    def constant(self) -> bool:
        """Whether the value never changes."""
        return not self.stages

    def pick(self, step: tf.Tensor, choices: Sequence[int]) -> int | tf.Tensor:
        """The one of `choices`, which stand for `values`, that holds at a step; an int if it never changes."""
        assert len(choices) == len(self.values)
        if self.constant:
            return choices[0]
        bounds = tf.constant([bound for bound, _ in self.stages], tf.int32)
        stage = tf.reduce_sum(tf.cast(tf.cast(step, tf.int32) >= bounds, tf.int32))
        return tf.gather(tf.constant(choices, tf.int32), stage)
