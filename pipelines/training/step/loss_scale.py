"""The loss scale of training with half floats."""

import re
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE
from models.compression.exchange.wire import Collective

_SMALLEST = 1.0
_NAMED_RANKS = 8
_RANKS = re.compile(re.escape(GRADIENTS_NOT_FINITE) + r" at a loss scale of [^]]*\] \[([^]]+)\]")


class LossScale:
    """Multiplies the loss before the backward pass, so that small gradients do not become zero in half floats.

        every rank's gradients are finite:  update;  after `growth_steps` such steps in a row, scale = 2 * scale
        otherwise:                          no exchange and no update on any rank;  scale = scale / 2

    The ranks agree with one sum of 4 bytes per rank before the exchange. A skipped step therefore does not change the
    residuals of codecs. Scales are powers of 2, so division is exact.

    Source: Micikevicius et al. 2018, "Mixed precision training", section 3.2.
    """

    def __init__(self, *, initial: float = 2.0**15, growth_steps: int = 2000) -> None:
        """Create the state.

        Args:
            initial: First scale, a power of 2.
            growth_steps: Number of steps without an overflow after which the scale doubles.
        """
        self.growth_steps = growth_steps
        self.scale = keras.Variable(initial, dtype="float32", trainable=False, name="loss_scale")
        self.skipped = keras.Variable(0, dtype="int32", trainable=False, name="loss_scale_skipped")
        """Number of skipped steps so far."""
        self.steps_since = keras.Variable(0, dtype="int32", trainable=False, name="loss_scale_steps")
        self.variables = [self.scale, self.steps_since, self.skipped]
        """All variables that a checkpoint must contain; they are equal on every rank."""

    def multiply(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the scaled loss."""
        return loss * self.scale.value

    def divide(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the gradients of the unscaled loss, in float32."""
        return [tf.cast(gradient, tf.float32) / self.scale.value for gradient in gradients]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def update(self, gradients: Sequence[tf.Tensor], collective: Collective, take_step: Callable[[], object]) -> None:
        """Take the step if the gradients of all ranks are finite, and adapt the scale; all ranks call this together.

        Raises:
            tf.errors.InvalidArgumentError: Gradients are not finite even at a scale of 1, so the scale is not the
                cause. `ranks_not_finite` names the ranks.
        """
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
        overflows = tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.float32)
        own = overflows * tf.one_hot(collective.rank, collective.size)
        (overflowing,) = collective.allreduce([own], "loss_scale_overflows")

        def grow() -> tf.Tensor:
            take_step()
            steps = self.steps_since.value + 1
            is_due = steps >= self.growth_steps
            self.scale.assign(tf.where(is_due, 2.0 * self.scale.value, self.scale.value))
            self.steps_since.assign(tf.where(is_due, 0, steps))
            return tf.constant(True)

        def skip() -> tf.Tensor:
            text = f"{GRADIENTS_NOT_FINITE} at a loss scale of {_SMALLEST:g}, on ranks"
            ranks = tf.where(overflowing > 0)[:, 0]
            can_shrink = tf.debugging.Assert(self.scale.value > _SMALLEST, [text, ranks], summarize=_NAMED_RANKS)
            with tf.control_dependencies([can_shrink]):
                self.scale.assign(self.scale.value / 2.0)
            if collective.rank == 0:
                tf.print("an overflow: no rank takes this step; the loss scale is now", self.scale.value)
            self.steps_since.assign(0)
            self.skipped.assign_add(1)
            return tf.constant(False)

        tf.cond(tf.reduce_any(overflowing > 0), skip, grow)


def ranks_not_finite(message: str) -> str | None:
    """Return the ranks that an error of `LossScale.update` names, as a text; None for other errors."""
    named = _RANKS.search(message)
    return None if named is None else ", ".join(named[1].split())
