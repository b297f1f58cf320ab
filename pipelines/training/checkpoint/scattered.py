"""Variables of a checkpoint of which every rank has a part: the moments of a sharded optimizer.

A checkpoint has them whole, under the names and in the order of the undivided optimizer. So it does not say how many
ranks wrote it, and any number of ranks can read it, with the optimizer divided or not.
"""

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from models.optimizers.pieces import Part
from models.optimizers.sharded import ShardedOptimizer
from pipelines.training.ranks.collective import HorovodCollective


@dataclass(frozen=True)
class Gathered:
    """The whole of a scattered variable, as `np.asarray` takes it."""

    path: str
    whole: NDArray[Any]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The values in the shape of the whole."""
        return self.whole if dtype is None else self.whole.astype(dtype)


class Scattered:
    """A variable of the optimizer on this rank, with the shape of the whole of which it is a part."""

    def __init__(self, variable: keras.Variable, part: Part) -> None:
        """Take this rank's part of the variable, `(elements,)`, and which one it is."""
        self._variable, self._part = variable, part
        self.path, self.dtype = variable.path, variable.dtype
        self.shape = part.shape
        """Shape of the whole, which is that of the model's variable."""

    @property
    def value(self) -> tf.Variable:
        """This rank's part."""
        return self._variable.value

    def assign(self, whole: NDArray[Any]) -> None:
        """Take this rank's part of the whole."""
        self._variable.assign(np.reshape(whole, -1)[self._part.start : self._part.stop])

    def gather(self, collective: HorovodCollective) -> Gathered:
        """Return the whole from the parts of all ranks, which call this together."""
        whole = collective.concatenate(np.asarray(self._variable))
        return Gathered(self.path, whole.reshape(self.shape))

    def spread(self, collective: HorovodCollective, whole: NDArray[Any] | None) -> None:
        """Let every rank take its part of the whole that rank 0 has; all ranks call this together."""
        values = np.zeros(self.shape, self.dtype) if whole is None else whole
        everyones = tf.Variable(values, trainable=False)
        collective.broadcast([everyones])
        self.assign(everyones.numpy())


def gather(variable: "keras.Variable | Scattered", collective: HorovodCollective) -> "keras.Variable | Gathered":
    """Return the whole of a variable, if the ranks divide it; all ranks call this together."""
    return variable.gather(collective) if isinstance(variable, Scattered) else variable


def whole_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the variables of an optimizer as a checkpoint has them: those that ranks divide are `Scattered`."""
    if not isinstance(optimizer, ShardedOptimizer):
        return list(optimizer.variables)
    parts = optimizer.parts
    return [Scattered(each, parts[id(each)]) if id(each) in parts else each for each in optimizer.variables]


def equal_on_ranks(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables of an optimizer that every rank has whole."""
    return [each for each in whole_variables(optimizer) if not isinstance(each, Scattered)]
