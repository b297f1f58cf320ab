"""The rule for the gradients of a rank, in modes whose ranks train whole networks."""

from collections.abc import Callable, Sequence
from typing import Protocol

import keras
import tensorflow as tf

Apply = Callable[[Sequence[tf.Tensor]], None]
"""Lets the optimizer update the model with one gradient per trainable variable; part of a graph."""


def once_all_arrived(means: Sequence[tf.Tensor], flags: tf.Tensor | None) -> list[tf.Tensor]:
    """Return the means over the ranks; they also wait for the flags of the stop agreement, if there is one.

    The exchange returns no mean before it has all of them. So the update starts only after all communication of the
    step has succeeded. If a rank dies, the others have applied all means of a step or none.
    """
    if flags is None:
        return list(means)
    with tf.control_dependencies([flags]):
        return [tf.identity(mean) for mean in means]


class Rule(Protocol):
    """The rule for the gradients of this rank in one step, in modes whose ranks train whole networks.

    The training step calls `begin_step` and `update` within its graph. Every rank makes the same calls, so a rule may
    use collectives.
    """

    shared: Sequence[keras.Variable] = ()
    """See `Mode`."""
    own: Sequence[keras.Variable] = ()
    """See `Mode`."""
    between: Sequence[tf.Variable] = ()
    """See `Mode`."""

    def begin(self, step: int) -> None:
        """See `Mode`."""
        return

    def block(self, step: int) -> int:
        """See `Mode`."""
        return step

    def begin_step(self) -> None:
        """Start the operations that come before the forward pass, if there are any."""
        return

    def update(self, gradients: Sequence[tf.Tensor], apply: Apply) -> None:
        """Update the model.

        Args:
            gradients: Gradients of this rank's loss, one float32 tensor per trainable variable.
            apply: The optimizer's update; a rule calls it once.

        Raises:
            tf.errors.InvalidArgumentError: Gradients or their means are not finite; see `GradientExchange.exchange`.
        """
