"""When the parts of a step began and ended, kept from inside its graph."""

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
    """Paths of the variables whose gradients it is about; empty where it is about all of them."""


class Marks:
    """Notes the times of the parts of a step; whoever has none of these adds nothing to the graph.

    The times are meaningful on a CPU, where an operation has run when its output is there.
    """

    def __init__(self) -> None:
        """Begin without any part: graphs add them as they are traced."""
        self._times: dict[Mark, tf.Variable] = {}

    def add(self, phase: str, name: str, start: tf.Tensor, end: tf.Tensor, tensors: Sequence[str] = ()) -> None:
        """Note a part in a graph, which may be a branch that is not taken in every step.

        Args:
            phase: Kind of the part.
            name: Its name, one for each part of a phase.
            start: Seconds since 1970, float64.
            end: The same.
            tensors: Paths of the variables that it is about.
        """
        mark = Mark(phase, name, tuple(tensors))
        if mark not in self._times:
            with tf.init_scope(), tf.device("CPU:0"):
                self._times[mark] = tf.Variable([math.nan, math.nan], dtype=tf.float64, trainable=False)
        # A clock that nobody waits for may be read a little late.
        self._times[mark].assign(tf.stack([tf.minimum(start, end), end]))

    def clear(self) -> None:
        """Forget all times, outside a graph."""
        for variable in self._times.values():
            variable.assign([math.nan, math.nan])

    def read(self) -> list[tuple[Mark, float, float]]:
        """Return start and end of each part that ran since `clear`, outside a graph."""
        taken = [(mark, *variable.numpy().tolist()) for mark, variable in self._times.items()]
        return [(mark, start, end) for mark, start, end in taken if math.isfinite(start) and math.isfinite(end)]
