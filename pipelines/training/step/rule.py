"""What a step of whole networks does with the gradients of a rank."""

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


class Rule(Protocol):
    """What one step does with the gradients of this rank, in modes whose ranks train whole networks.

    The training step calls `begin_step` and `update` within its graph; every rank makes the same calls, so that a rule
    may use collectives wherever it says so.
    """

    shared: Sequence[keras.Variable]
    """See `Mode`."""
    own: Sequence[keras.Variable]
    """See `Mode`."""
    between: Sequence[tf.Variable]
    """See `Mode`."""

    def begin(self, step: int) -> None:
        """See `Mode`."""
        ...

    def block(self, step: int) -> int:
        """See `Mode`."""
        ...

    def begin_step(self) -> None:
        """Do what comes before the forward pass."""
        ...

    def update(self, gradients: Sequence[tf.Tensor], apply: Apply) -> None:
        """Update the model.

        Args:
            gradients: One float32 gradient of this rank's loss per trainable variable.
            apply: The optimizer's update; a rule calls it once.

        Raises:
            tf.errors.InvalidArgumentError: Gradients or their means are not finite; see `GradientExchange.exchange`.
        """
        ...
