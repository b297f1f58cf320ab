"""What a rank holds as a shard of a parameter server, and how weights are divided among shards."""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from pipelines.training.modes.optimizer_state import state_of
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
            variables: Those of the shard, among `trained`; none where there are more ranks than variables.
            trained: All trainable variables of the model.
            optimizer: The optimizer of all of them.
            copy_optimizer: Makes that of the copies.
        """
        self._variables, self._whole = list(variables), optimizer
        self._copies = [
            # Keras would take a variable of TensorFlow as it is.
            keras.Variable(tf.identity(variable.value), trainable=True, name=f"shard_{number}")
            for number, variable in enumerate(variables)
        ]
        for copy, variable in zip(self._copies, self._variables, strict=True):
            copy.constraint = variable.constraint
        self._whole_state = state_of(variables, trained, optimizer)
        if not self._copies:
            return
        pairs = zip(variables, self._copies, strict=True)
        self.optimizer, factors = copy_optimizer({id(variable): copy for variable, copy in pairs})
        counted = {id(self.optimizer.iterations), id(self.optimizer._learning_rate)}
        self._state = [each for each in self.optimizer.variables if id(each) not in counted]
        assert [each.shape for each in self._state] == [each.shape for each in self._whole_state]
        apply = make_apply(self.optimizer, self._copies, rate_factors=factors)
        self._update = tf.function(lambda *gradients: apply(list(gradients)), autograph=False)
        self._read = tf.function(
            lambda: tf.concat([tf.reshape(copy.value, [-1]) for copy in self._copies], 0), autograph=False
        )

    def update(self, gradients: Gradients, rate: float) -> None:
        """Change the weights by gradients, at a learning rate."""
        if self._copies:
            self.optimizer.learning_rate = rate
            self._update(*map(tf.constant, gradients))

    def read(self) -> bytes:
        """Return all weights as bytes."""
        return self._read().numpy().tobytes() if self._copies else b""

    def take_over(self) -> None:
        """Take weights and state from the model and its optimizer."""
        for copy, variable in zip(self._copies, self._variables, strict=True):
            copy.assign(variable.value)
        if self._copies:
            for own, whole in zip(self._state, self._whole_state, strict=True):
                own.assign(whole.value)
            self.optimizer.iterations.assign(self._whole.iterations.value)

    def give_back(self) -> None:
        """Set the model's weights of this shard, and their state, to those here."""
        for copy, variable in zip(self._copies, self._variables, strict=True):
            variable.assign(copy.value)
        if self._copies:
            for own, whole in zip(self._state, self._whole_state, strict=True):
                whole.assign(own.value)
            self._whole.iterations.assign(self.optimizer.iterations.value)


def divide(shapes: Sequence[tuple[int, ...]], shards: int) -> list[list[int]]:
    """Divide tensors among shards of about the same size: each goes, the largest first, to the shard with the least.

    Args:
        shapes: One for each tensor.
        shards: Number of shards.

    Returns:
        Positions of the tensors of each shard, in their order; the first shard has the largest tensor.
    """
    sizes, found = [0] * shards, [[] for _ in range(shards)]  # type: tuple[list[int], list[list[int]]]
    for index in sorted(range(len(shapes)), key=lambda each: -math.prod(shapes[each])):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += math.prod(shapes[index])
        found[smallest].append(index)
    return [sorted(indexes) for indexes in found]
