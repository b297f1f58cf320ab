"""What every training mode is: the rule by which the ranks keep one model between them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import keras
import tensorflow as tf

Apply = Callable[[Sequence[tf.Tensor]], None]
"""Lets the optimizer update the model by one gradient per trainable variable; part of a graph."""


def once_all_arrived(means: Sequence[tf.Tensor], flags: tf.Tensor | None) -> list[tf.Tensor]:
    """Return means over the ranks that wait for the flags of the agreement on when to stop, if there is one.

    The exchange gives no mean before it has all of them. So an update by these means begins when nothing that comes
    from other ranks can fail any more: where a rank dies, the others have applied all means of a step, or none.
    """
    if flags is None:
        return list(means)
    with tf.control_dependencies([flags]):
        return [tf.identity(mean) for mean in means]


class Mode(Protocol):
    """What one step does with the gradients of this rank.

    The training step calls `begin_step` and `update` within its graph; every rank makes the same calls, so that a mode
    may use collectives wherever it says so.
    """

    shared: Sequence[keras.Variable]
    """State that is equal on every rank; rank 0 writes it into the checkpoint, beside model and optimizer."""
    own: Sequence[keras.Variable]
    """Variables, also of the optimizer, that differ between the ranks; each rank writes its own."""
    between: Sequence[tf.Variable]
    """What a rank holds only until the ranks come together again, so that no checkpoint has it."""

    def begin(self, step: int) -> None:
        """Start from the weights that all ranks have now, after so many optimizer steps; outside a graph."""
        ...

    def block(self, step: int) -> int:
        """Number of steps after which the ranks came together last, for a rank that has done `step` optimizer steps.

        Ranks with the same number can continue together, each from its own state.
        """
        ...

    def begin_step(self) -> None:
        """Do what comes before the forward pass."""
        ...

    def update(self, gradients: Sequence[tf.Tensor], apply: Apply) -> None:
        """Update the model.

        Args:
            gradients: One float32 gradient of this rank's loss per trainable variable.
            apply: The optimizer's update; a mode calls it once.

        Raises:
            tf.errors.InvalidArgumentError: Gradients or their means are not finite; see `GradientExchange.exchange`.
        """
        ...
