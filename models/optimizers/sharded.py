"""An optimizer with its state divided among the ranks, and the parts of variables that it accepts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from models.optimizers.layerwise import HalfUpdate, InTwoHalves, sum_of_squares


@dataclass(frozen=True)
class ElementRange:
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
            start: See `ElementRange`.
            stop: See `ElementRange`.

        Raises:
            ValueError: the variable has another type.
        """
        if variable.dtype != "float32":
            raise ValueError(f"{variable.path} is of {variable.dtype}, and only variables of float32 can be divided")
        self._variable = variable
        self.part = ElementRange(tuple(variable.shape), start, stop)
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


class Shards(Protocol):
    """The division of the variables among ranks, and their exchange; see `models.compression.exchange.shards`."""

    ranges: list[tuple[int, int]]
    """Start and stop of this rank's range of elements of each variable."""

    def exchange(self, gradients: Sequence[tf.Tensor], learning_rate: Any = None) -> list[tf.Tensor]:
        """Return this rank's ranges of the mean gradients."""

    def sum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sums of a few numbers over the ranks."""

    def gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the whole tensors from the ranges of all ranks."""


class ShardedOptimizer:
    """Each of N ranks keeps the optimizer's moments for an N-th of the parameters, and updates only these (ZeRO-1).

        exchange:   rank r gets its part of the mean gradient             (reducescatter)
        update:     the part r of the weights and of the moments, by the rule of the optimizer
        gather:     every rank gets all parts of the new weights          (allgather)

    The optimizer itself, built on pieces of the variables, provides the rule. Ratios of norms (LARS, LAMB) and the
    global norm of gradient clipping need sums of squares over all ranks: one sum of a few numbers each. So the weights
    are those of the undivided optimizer, except for the order of sums.

    A rank holds, in bytes for each parameter of float32, 4 for the weight and 4 for the gradient. Each moment takes
    4/N in place of 4. That is 8 + 4/N with one moment (SGD, LARS) and 8 + 8/N with two (AdamW, LAMB). Weights are cut
    out of the model's variables during the update, and no second copy of them is kept.

    When it pays: moments take memory that a larger batch or network needs, so with two moments, many ranks, and
    networks of many parameters. With AdamW on 8 ranks, a parameter takes 9 bytes in place of 16. When it does not pay:
    activations take the memory, as in a ResNet-50 on images, whose 24 million parameters have 95 MB for each moment. It
    does not pay on links with long delays either: a step has three or four consecutive exchanges instead of one. The
    gathering begins only after the update, so that no backward pass hides it. The bytes are those of one allreduce.

    If a rank dies before all ranks have all means, no rank has applied an update. If it dies later in the step, others
    may have updated their moments but not their weights. They never continue from there: an in-memory checkpoint and a
    checkpoint contain both.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.1
    (P_os).
    Differs: every rank keeps all float32 weights and computes with them; there is no second copy in half floats.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], shards: Shards
    ) -> None:
        """Build the optimizer on this rank's pieces.

        Args:
            optimizer: The optimizer, not built yet. Its `global_clipnorm` holds for the whole gradient.
            variables: The trainable variables of the model.
            shards: Division of the variables, which also averages the gradients.
        """
        self._optimizer, self._variables = optimizer, list(variables)
        self.exchange = shards
        """The exchange that averages the gradients; `apply` takes the result of its `exchange`."""
        ranges = zip(self._variables, shards.ranges, strict=True)
        self._pieces = [Piece(variable, start, stop) for variable, (start, stop) in ranges]
        optimizer.build(self._pieces)
        shared = {id(optimizer.iterations), id(optimizer._learning_rate)}
        moments = [variable for variable in optimizer.variables if id(variable) not in shared]
        # An optimizer creates all moments of one variable, then those of the next variable.
        each = len(moments) // len(self._pieces)
        self.parts = {id(moment): self._pieces[number // each].part for number, moment in enumerate(moments)}
        """Part of each moment in the whole, by the `id` of the moment; the other variables are equal on all ranks."""

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of the optimizer, in the order of the undivided one; the moments are parts."""
        return list(self._optimizer.variables)

    @property
    def iterations(self) -> keras.Variable:
        """Number of updates so far."""
        return self._optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next update."""
        return self._optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._optimizer.learning_rate = value

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, means: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> None:
        """Update the model on every rank; all ranks call this together.

        Args:
            means: Result of `exchange.exchange`.
            variables: The trainable variables of the model, for which this optimizer was made.
        """
        assert all(one is other for one, other in zip(variables, self._variables, strict=True))
        gradients = self._clipped(means)
        for piece in self._pieces:
            piece.take()
        self._decay()
        self._update(gradients)
        self._optimizer.iterations.assign_add(1)
        wholes = self.exchange.gather([piece.give() for piece in self._pieces])
        with tf.control_dependencies(wholes):  # all new weights or none
            for variable, whole in zip(self._variables, wholes, strict=True):
                variable.assign(whole if variable.constraint is None else variable.constraint(whole))

    def _clipped(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Return the gradients, scaled to the largest global norm as in Keras."""
        largest = self._optimizer.global_clipnorm
        if not largest:
            return gradients
        squares = tf.add_n([sum_of_squares(gradient) for gradient in gradients])
        (total,) = tf.unstack(self.exchange.sum(tf.stack([squares]), "shards_global_norm"))
        scale = largest * tf.minimum(1.0 / tf.sqrt(total), 1.0 / largest)
        return [gradient * scale for gradient in gradients]

    def _decay(self) -> None:
        """Apply the decoupled decay that Keras's own optimizers leave to their base class."""
        decay = self._optimizer.weight_decay
        if decay is None:
            return
        rate = tf.cast(self._optimizer.learning_rate, tf.float32)
        for piece in self._pieces:
            if self._optimizer._use_weight_decay(piece):
                piece.assign_sub(piece.read_value() * decay * rate)

    def _update(self, gradients: Sequence[tf.Tensor]) -> None:
        optimizer, rate = self._optimizer, self._optimizer.learning_rate
        pairs = list(zip(gradients, self._pieces, strict=True))
        if not isinstance(optimizer, InTwoHalves):
            for gradient, piece in pairs:
                optimizer.update_step(gradient, piece, rate)
            return
        halves = [optimizer.begin_update(gradient, piece) for gradient, piece in pairs]
        for half, norms, piece in zip(halves, self._norms(halves), self._pieces, strict=True):
            optimizer.finish_update(half, norms, piece, rate)

    def _norms(self, halves: Sequence[HalfUpdate]) -> list[list[tf.Tensor]]:
        """Return the norms over all ranks of the tensors that the first halves measured."""
        squares = [sum_of_squares(tensor) for half in halves for tensor in half.measured]
        if not squares:
            return [[] for _ in halves]
        norms = iter(tf.unstack(tf.sqrt(self.exchange.sum(tf.stack(squares), "shards_norms"))))
        return [[next(norms) for _ in half.measured] for half in halves]
