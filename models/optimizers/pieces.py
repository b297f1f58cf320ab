"""A part of a variable, in the form that an optimizer of Keras accepts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf


@dataclass(frozen=True)
class Part:
    """A range of the elements of a tensor, in row-major order."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    stop: int
    """The element after the last one; equal to `start` for a part without elements."""


class Piece:
    """A part of a variable, with the interface that an optimizer's `build` and `update_step` need.

    The piece has no memory: `take` cuts it out of the variable, the optimizer's assignments become its value in the
    graph of the step, and `give` returns this value. The optimizer identifies the piece with its variable, by path and
    identity. So lists of variables without weight decay hold for the pieces too, and the optimizer's state has the same
    names as for whole variables.
    """

    def __init__(self, variable: keras.Variable, start: int, stop: int) -> None:
        """Take no value yet.

        Args:
            variable: A trainable variable of float32.
            start: See `Part`.
            stop: See `Part`.

        Raises:
            ValueError: the variable has another type.
        """
        if variable.dtype != "float32":
            raise ValueError(f"{variable.path} is of {variable.dtype}, and only variables of float32 can be divided")
        self._variable = variable
        self.part = Part(tuple(variable.shape), start, stop)
        self._value: tf.Tensor | None = None
        self.path, self.name, self.dtype = variable.path, variable.name, variable.dtype
        self.shape = (stop - start,)
        self.device: str = variable.value.device
        """Device on which the optimizer places its state."""
        self._unique_id = variable.value._unique_id

    def take(self) -> None:
        """Cut the value out of the variable."""
        self._value = tf.reshape(self._variable.value, [-1])[self.part.start : self.part.stop]

    def give(self) -> tf.Tensor:
        """Return and forget the value, which belongs to the graph in which it was taken."""
        value, self._value = self.read_value(), None
        return value

    def read_value(self) -> tf.Tensor:
        """Return the value `(elements,)`."""
        assert self._value is not None, "a piece has a value from `take` to `give`"
        return self._value

    def assign(self, value: tf.Tensor) -> None:
        """Set the value."""
        self._value = value

    def assign_add(self, value: tf.Tensor) -> None:
        """Add to the value."""
        self._value = self.read_value() + value

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtract from the value."""
        self._value = self.read_value() - value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the value when TensorFlow or Keras converts the piece to a tensor."""
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)


def cut(variables: Sequence[keras.Variable], ranges: Sequence[tuple[int, int]]) -> list[Piece]:
    """Return a piece of each variable."""
    return [Piece(variable, *bounds) for variable, bounds in zip(variables, ranges, strict=True)]
