"""Checkpoint variables that are divided among the ranks: the moments of a sharded optimizer.

A checkpoint contains them whole, with the names and in the order of the undivided optimizer. So it does not depend on
the number of ranks that wrote it. Any number of ranks can read it, with the optimizer divided or not.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from models.optimizers.sharded import ElementRange, ShardedOptimizer
from pipelines.training.ranks.collective import HorovodCollective


class Gathered(NamedTuple):
    """A scattered variable as a whole."""

    path: str
    value: NDArray[Any]


class Scattered:
    """A variable of the optimizer on this rank that is a part of a whole; it has the shape of the whole."""

    def __init__(self, variable: keras.Variable, part: ElementRange) -> None:
        """Wrap this rank's part of the variable, `(elements,)`; `part` is its position in the whole."""
        self._variable, self._part = variable, part
        self.path, self.dtype = variable.path, variable.dtype
        self.shape = part.shape
        """The shape of the whole, which is the shape of the model's variable."""

    @property
    def value(self) -> tf.Variable:
        """The part of this rank."""
        return self._variable.value

    def assign(self, whole: NDArray[Any]) -> None:
        """Set this rank's part from the whole."""
        self._variable.assign(np.reshape(whole, -1)[self._part.start : self._part.stop])

    def gather(self, collective: HorovodCollective) -> Gathered:
        """Return the whole from the parts of all ranks, which call this together."""
        return Gathered(self.path, collective.concatenate(np.asarray(self._variable)).reshape(self.shape))

    def spread(self, collective: HorovodCollective, whole: NDArray[Any] | None) -> None:
        """Set the part of every rank from the whole on rank 0; all ranks call this together."""
        everyones = tf.Variable(np.zeros(self.shape, self.dtype) if whole is None else whole, trainable=False)
        collective.broadcast([everyones])
        self.assign(everyones.numpy())


def whole_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the variables of an optimizer as a checkpoint has them: divided ones are `Scattered`."""
    if not isinstance(optimizer, ShardedOptimizer):
        return list(optimizer.variables)
    parts = optimizer.parts
    return [Scattered(each, parts[id(each)]) if id(each) in parts else each for each in optimizer.variables]
