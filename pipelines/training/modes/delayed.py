"""Delayed gradients: every step applies the gradients of the previous step, so that no step waits for the network."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from conf.sections.modes import DelayedConfig
from models.compression.exchange.exchange import GradientExchange
from pipelines.training.modes.whole_networks import WholeNetworks
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.step.mode import Mode, ModeInputs
from pipelines.training.step.rule import Apply, Rule, once_all_arrived


class Delayed(Rule):
    """The rule of delayed gradients: a step exchanges the previous step's gradients while it computes its own.

        step t:   m = mean over the ranks of g(t-1), during the forward and backward pass that gives g(t) = g(w(t))
                  w(t+1) = optimizer's update of w(t) by m

    The first step applies nothing, and the gradients of the last step are never applied. Every rank holds the same
    weights after every step, as in synchronous training. The result does not depend on how the global batch is divided
    among workers. But each gradient belongs to weights that are one update old.

    When it pays: if the exchange takes about as long as forward and backward pass and cannot be compressed. A step then
    takes the longer of the two times instead of their sum. When not: if synchronous training already hides the
    exchange, which starts there during the backward pass. Also not at rates near the largest that still converge: the
    delay makes training less stable, and with momentum 0.9 the rate must be lower. One more gradient is held in memory.

    Source: Zinkevich, Langford, Smola 2009, "Slow learners are fast", with a delay of 1; Zhu et al. 2021, "Delayed
    gradient averaging".
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        exchange: GradientExchange,
        stop: StopAgreement | None,
    ) -> None:
        """Create the variables that hold the gradients between steps.

        Args:
            model: The model; its trainable variables have the gradients.
            optimizer: Its optimizer, already built.
            exchange: Averages the gradients.
            stop: The agreement on when to stop; each step includes it. None if training cannot be asked to stop.
        """
        self._optimizer, self._exchange, self._stop = optimizer, exchange, stop
        self._pending = [
            keras.Variable(tf.zeros(each.shape), trainable=False, name=f"pending_{each.path.replace('/', '.')}")
            for each in model.trainable_variables
        ]
        self._has_pending = keras.Variable(0, dtype="int32", trainable=False, name="has_pending")
        self._means: list[tf.Tensor] = []
        self.shared, self.own = [self._has_pending], self._pending

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def begin_step(self) -> None:
        """Start the exchange of the last step's gradients and of the stop flags, in parallel with this step."""
        flags = None if self._stop is None else self._stop.exchange()
        pending = [variable.value.read_value() for variable in self._pending]
        means = self._exchange.exchange(pending, self._optimizer.learning_rate)
        self._means = once_all_arrived(means, flags)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def update(self, gradients: Sequence[tf.Tensor], apply: Apply) -> None:
        """Apply the means of the last step and store these gradients for the next one; see `Rule`."""
        means = self._means

        def take_step() -> bool:
            apply(means)
            return True

        with tf.control_dependencies(means):  # otherwise a branch would start operations that need no mean too early
            has_pending = self._has_pending.value > 0
        tf.cond(has_pending, take_step, lambda: False)
        self._has_pending.assign(1)
        for variable, gradient in zip(self._pending, gradients, strict=True):
            variable.assign(gradient)


def make(inputs: ModeInputs, settings: DelayedConfig) -> Mode:
    """Make the mode; see `MakeMode`."""
    exchange, optimizer = inputs.make_exchange(), inputs.make_optimizer()
    return WholeNetworks(inputs, optimizer, exchange, Delayed(inputs.model, optimizer, exchange, inputs.stop))
