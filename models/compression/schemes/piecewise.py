"""Densities and ranks that change at given steps."""

from collections.abc import Sequence
from typing import TypeVar

import tensorflow as tf

Number = TypeVar("Number", int, float)


class PiecewiseConstant:
    """A function of the step that is constant between given steps; `values` are all its values, in order.

    Args:
        final: Value after the last bound.
        schedule: Pairs `(before_step, value)` by rising `before_step`; each value holds before that step.

    Raises:
        ValueError: bounds that do not rise.
    """

    def __init__(self, final: float, schedule: Sequence[tuple[int, float]] = ()) -> None:
        """Store the values and their bounds."""
        bounds = [bound for bound, _ in schedule]
        if bounds != sorted(set(bounds)) or (bounds and bounds[0] < 1):
            raise ValueError(f"a schedule must have rising values of before_step, 1 or more, got {bounds}")
        self.schedule = tuple(schedule)
        self.values = (*[value for _, value in schedule], final)

    @property
    def constant(self) -> bool:
        """Whether the value never changes."""
        return not self.schedule

    def pick(self, step: tf.Tensor, choices: Sequence[Number]) -> Number | tf.Tensor:
        """Return the entry of `choices` whose counterpart in `values` holds at this step.

        Args:
            step: Number of exchanges before this one, int32.
            choices: One number for each of `values`, all int or all float.

        Returns:
            A Python number if the value never changes, otherwise a scalar tensor.
        """
        if self.constant:
            return choices[0]
        bounds = tf.constant([bound for bound, _ in self.schedule], tf.int32)
        place = tf.reduce_sum(tf.cast(tf.cast(step, tf.int32) >= bounds, tf.int32))
        return tf.gather(tf.constant(choices), place)

    def scaled(self, factor: float) -> "PiecewiseConstant":
        """Return the function times `factor`, at most 1."""
        schedule = [(bound, min(1.0, factor * value)) for bound, value in self.schedule]
        return PiecewiseConstant(min(1.0, factor * self.values[-1]), schedule)


def density_by_step(density: float, schedule: Sequence[tuple[int, float]]) -> PiecewiseConstant:
    """Return the density as a function of the step.

    Args:
        density: Part of all elements that is sent, in (0, 1], after the schedule.
        schedule: Pairs `(before_step, density)` for the first steps.

    Raises:
        ValueError: a density out of range, or bounds that do not rise.
    """
    result = PiecewiseConstant(density, schedule)
    for value in result.values:
        if not 0 < value <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {value}")
    return result


def elements_to_send(density: PiecewiseConstant, step: tf.Tensor, elements: int) -> int | tf.Tensor:
    """Return how many of `elements` are sent at a step, at least 1; a tensor if the density depends on the step."""
    return density.pick(step, [max(1, round(value * elements)) for value in density.values])
