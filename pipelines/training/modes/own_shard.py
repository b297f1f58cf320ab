"""The weights and the optimizer of one rank's shard of a parameter server, and the division of weights into shards."""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from pipelines.training.modes.optimizer_state import moments_of, state_of
from pipelines.training.modes.shard import Gradients
from pipelines.training.step.mode import CopyOptimizer
from pipelines.training.step.step import make_apply


class OwnShard:
    """The weights of this rank's shard, and the optimizer that changes them."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
        optimizer: keras.optimizers.Optimizer,
        copy_optimizer: CopyOptimizer,
    ) -> None:
        """Copy the weights and the optimizer's state.

        Args:
            variables: Variables of the shard, which are some of `trained`; none if there are more ranks than variables.
            trained: All trainable variables of the model.
            optimizer: The optimizer of all variables.
            copy_optimizer: Makes the optimizer of the copies.
        """
        self._copies = [
            # Keras would not copy a TensorFlow variable.
            keras.Variable(tf.identity(variable.value), trainable=True, name=f"shard_{number}")
            for number, variable in enumerate(variables)
        ]
        self._pairs = list(zip(self._copies, variables, strict=True))
        if not self._copies:
            return
        for copy, variable in self._pairs:
            copy.constraint = variable.constraint
        self.optimizer, factors = copy_optimizer({id(variable): copy for copy, variable in self._pairs})
        state = list(zip(moments_of(self.optimizer), state_of(variables, trained, optimizer), strict=True))
        assert all(own.shape == whole.shape for own, whole in state)
        self._pairs += [*state, (self.optimizer.iterations, optimizer.iterations)]
        apply = make_apply(self.optimizer, self._copies, rate_factors=factors)
        self._update = tf.function(lambda *gradients: apply(list(gradients)), autograph=False)
        self._read = tf.function(
            lambda: tf.concat([tf.reshape(copy.value, [-1]) for copy in self._copies], 0), autograph=False
        )

    def update(self, gradients: Gradients, rate: float) -> None:
        """Update the weights with gradients at a learning rate."""
        if self._copies:
            self.optimizer.learning_rate = rate
            self._update(*map(tf.constant, gradients))

    def read(self) -> bytes:
        """Return all weights as bytes."""
        return self._read().numpy().tobytes() if self._copies else b""

    def take_over(self) -> None:
        """Copy weights and state from the model and its optimizer."""
        for own, whole in self._pairs:
            own.assign(whole.value)

    def give_back(self) -> None:
        """Copy this shard's weights and state back to the model and its optimizer."""
        for own, whole in self._pairs:
            whole.assign(own.value)


def divide(shapes: Sequence[tuple[int, ...]], shards: int) -> list[list[int]]:
    """Divide tensors among shards of about the same size: the largest tensor first, each to the smallest shard.

    Args:
        shapes: One shape for each tensor.
        shards: Number of shards.

    Returns:
        The positions of each shard's tensors, in order; the first shard has the largest tensor.
    """
    sizes, found = [0] * shards, [[] for _ in range(shards)]  # type: tuple[list[int], list[list[int]]]
    for index in sorted(range(len(shapes)), key=lambda each: -math.prod(shapes[each])):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += math.prod(shapes[index])
        found[smallest].append(index)
    return [sorted(indexes) for indexes in found]
