"""Synchronous training: every step takes the mean of the gradients of all ranks."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from conf.sections.modes import SynchronousConfig
from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.shards import ShardExchange
from models.optimizers.sharded import ShardedOptimizer
from pipelines.training.modes.whole_networks import WholeNetworks
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.step.mode import Mode, ModeInputs
from pipelines.training.step.rule import Apply, Rule, once_all_arrived


class Synchronous(Rule):
    """The rule of synchronous training: all ranks apply the same mean gradient and so hold the same weights.

    This is the default. Except for batch norm, the result does not depend on how the global batch is divided among
    workers. It pays if the exchange of a step takes less time than its forward and backward pass, if necessary with
    compression.

    With `shard_optimizer` every rank applies its part of the mean and gets the other parts of the weights; see
    `models.optimizers.sharded.ShardedOptimizer`.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, exchange: GradientExchange, stop: StopAgreement | None = None
    ) -> None:
        """Store the arguments.

        Args:
            optimizer: The optimizer. The exchange of some codecs needs its learning rate.
            exchange: Averages the gradients; a sharded optimizer has its own exchange.
            stop: The agreement on when to stop; each step includes it. None if training cannot be asked to stop.
        """
        self._optimizer, self._stop = optimizer, stop
        self._exchange = optimizer.exchange if isinstance(optimizer, ShardedOptimizer) else exchange
        self._flags: tf.Tensor | None = None

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def begin_step(self) -> None:
        """Start the exchange of the stop flags while the gradients are computed."""
        self._flags = None if self._stop is None else self._stop.exchange()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def update(self, gradients: Sequence[tf.Tensor], apply: Apply) -> None:
        """Apply the mean over the ranks; see `Rule`."""
        means = self._exchange.exchange(gradients, self._optimizer.learning_rate)
        apply(once_all_arrived(means, self._flags))


def make(inputs: ModeInputs, settings: SynchronousConfig) -> Mode:
    """Make the mode; see `MakeMode`."""
    exchange, shards = inputs.make_exchange(), None
    if settings.shard_optimizer:
        shards = ShardExchange(exchange, inputs.collective, inputs.model.trainable_variables)
    optimizer = inputs.make_optimizer(shards)
    return WholeNetworks(inputs, optimizer, exchange, Synchronous(optimizer, exchange, inputs.stop))
