"""The training modes in which every rank has the whole network; they differ only in their rule for the gradients."""

import keras

from models.compression.exchange.exchange import GradientExchange
from pipelines.training.step.accumulation import Accumulation
from pipelines.training.step.loop import average_statistics
from pipelines.training.step.mode import ModeInputs
from pipelines.training.step.rule import Rule
from pipelines.training.step.step import make_accumulate, make_train_step


class WholeNetworks:
    """A `Mode` that is defined by a rule for the gradients of each step."""

    def __init__(
        self, inputs: ModeInputs, optimizer: keras.optimizers.Optimizer, exchange: GradientExchange, rule: Rule
    ) -> None:
        """Make the step, which is compiled when it is first called.

        Raises:
            ValueError: Codec and optimizer do not fit each other.
        """
        self.optimizer, self.exchange, self.rule = optimizer, exchange, rule
        self.shared, self.own, self.between = rule.shared, rule.own, rule.between
        self.begin, self.block = rule.begin, rule.block
        self._inputs = inputs
        model, loss, scale = inputs.model, inputs.loss, inputs.loss_scale
        sums = Accumulation(model, inputs.micro_batches) if inputs.micro_batches > 1 else None
        self._sums = sums
        self.step = make_train_step(
            model,
            loss,
            optimizer,
            exchange,
            rule,
            jit_compile=inputs.jit_compile,
            accumulation=sums,
            loss_scale=scale,
            average=inputs.average,
            rate_factors=inputs.rate_factors,
            clocks=inputs.clocks,
        )
        self.accumulate = (
            None
            if sums is None
            else make_accumulate(model, loss, sums, jit_compile=inputs.jit_compile, loss_scale=scale)
        )

    def come_together(self) -> None:
        """Set the moving batch-norm statistics, which differ between ranks, to their mean."""
        average = self._inputs.average
        average_statistics(self._inputs.model, self._inputs.collective, () if average is None else average.statistics)

    def figures(self) -> dict[str, float]:
        """Return no figures."""
        return {}

    def payload_bytes(self) -> int:
        """See `Mode`."""
        return self.exchange.payload_bytes([variable.value for variable in self._inputs.model.trainable_variables])

    def reset(self) -> None:
        """See `Mode`."""
        if self._sums is not None:
            self._sums.reset()
