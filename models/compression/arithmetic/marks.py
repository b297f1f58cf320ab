"""The start and end times of the parts of a step, recorded inside its graph."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class Mark:
    """One part of a step."""

    phase: str
    name: str
    tensors: tuple[str, ...]
    """Paths of the variables whose gradients the part processes; empty: all variables."""


class Marks:
    """Records the times of the parts of a step; without such an object the graph has no clocks.

    The times are meaningful on a CPU, where an operation has finished when its output exists.
    """

    def __init__(self) -> None:
        """Begin without parts: graphs add parts when they are traced."""
        self._times: dict[Mark, tf.Variable] = {}

    def add(self, phase: str, name: str, start: tf.Tensor, end: tf.Tensor, tensors: Sequence[str] = ()) -> None:
        """Record a part in a graph, which may be a branch that some steps do not run.

        Args:
            phase: Kind of the part.
            name: Name of the part, unique in its phase.
            start: Seconds since 1970, float64.
            end: The same.
            tensors: Paths of the variables that the part processes.
        """
        mark = Mark(phase, name, tuple(tensors))
        if mark not in self._times:
            with tf.init_scope(), tf.device("CPU:0"):
                self._times[mark] = tf.Variable([math.nan, math.nan], dtype=tf.float64, trainable=False)
        # No operation waits for this clock, so it may be read a little late.
        self._times[mark].assign(tf.stack([tf.minimum(start, end), end]))

    def clear(self) -> None:
        """Forget all times, outside a graph."""
        for variable in self._times.values():
            variable.assign([math.nan, math.nan])

    def read(self) -> list[tuple[Mark, float, float]]:
        """Return start and end of each part that ran since `clear`, outside a graph."""
        taken = [(mark, *variable.numpy().tolist()) for mark, variable in self._times.items()]
        return [(mark, start, end) for mark, start, end in taken if math.isfinite(start) and math.isfinite(end)]
