"""Local updates: every rank trains alone for some steps, then the ranks come together."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from conf.sections.modes import LocalConfig
from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE, all_finite, check_finite
from models.compression.codecs.none import NoneCodec
from models.compression.exchange.exchange import GradientExchange
from pipelines.training.modes.optimizer_state import moments_of
from pipelines.training.modes.whole_networks import WholeNetworks
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.step.mode import Mode, ModeInputs
from pipelines.training.step.rule import Apply, Rule, once_all_arrived


class LocalUpdates(Rule):
    """The rule of local updates: ranks apply their own gradients, and exchange weight changes only at borders.

        between two borders, on each rank:   w = inner update(w, g)                (the configured optimizer)
        at a border:                         d = anchor - w
                                             D = mean of d over the ranks           (any codec)
                                             anchor = outer update(anchor, D)       (SGD: rate, momentum, Nesterov)
                                             w = anchor

    Borders are the multiples of `every_steps`, counted from the first step of the run, and the last step of every
    epoch. So validation and checkpoints see one model. Between borders the ranks send nothing.

    Special cases: outer rate 1 and momentum 0 average the weights (local SGD). `local_after_steps` above 0 is
    post-local SGD. Momentum between 0 and 1 is the block momentum of BMUF (rate: its block learning rate), classical or
    Nesterov. Inner AdamW with outer Nesterov momentum 0.9 at rate 0.7 is DiLoCo.

    When it pays: if the exchange of a step takes longer than its computation even with a compressing codec. This mode
    divides the bytes by `every_steps`. When not: on fast networks, or with few steps in total (momentum 0.9 needs about
    100 borders to reach its speed). The result also depends on the number of workers, because each trains alone. On the
    same data, N workers with local steps do not equal one worker with an N times larger batch.

    Source: Stich 2019, "Local SGD converges fast and communicates little"; Lin et al. 2020, "Don't use large
    mini-batches, use local SGD"; Chen, Huo 2016 (BMUF); Douillard et al. 2023 (DiLoCo).
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        exchange: GradientExchange,
        stop: StopAgreement | None,
        *,
        steps_per_epoch: int,
        every_steps: int,
        local_after_steps: int,
        rate: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Create anchors and outer state.

        Args:
            model: The model; its trainable variables are exchanged, batch-norm statistics are not.
            optimizer: The inner optimizer, already built; its moments stay on their rank.
            exchange: Averages the weight changes of the ranks.
            stop: The agreement on when to stop. The ranks check it when they come together. None: no agreement.
            steps_per_epoch: Number of optimizer steps per epoch.
            every_steps: Number of steps between borders.
            local_after_steps: Number of first steps that average gradients in float32, as synchronous training does.
            rate: Learning rate of the outer update.
            momentum: Momentum of the outer update, in [0, 1).
            nesterov: Whether the outer momentum is Nesterov's.
        """
        self._weights = model.trainable_variables
        self._optimizer, self._exchange, self._stop = optimizer, exchange, stop
        self._steps_per_epoch, self._every, self._first = steps_per_epoch, every_steps, local_after_steps
        self._anchors = [tf.Variable(variable.value, trainable=False) for variable in self._weights]
        self._rate = rate
        self._outer = keras.optimizers.SGD(rate, momentum=momentum, nesterov=nesterov and momentum > 0, name="outer")
        self._outer.build(self._weights)
        # Without a codec the exchange has no state between steps.
        self._dense = GradientExchange(
            NoneCodec(),
            exchange.collective,
            dense_below=0,
            bucket_mib=exchange.bucket_mib,
            warmup_steps=0,
            rescale_residual=False,
            seed=exchange.seed,
            jit_compile=exchange.jit_compile,
        )
        self._dense.marks = exchange.marks
        self._dense.build(self._weights)
        self.shared = list(self._outer.variables)
        self.own = moments_of(optimizer)
        self.between = self._anchors

    def begin(self, step: int) -> None:
        """Take the weights of all ranks as the anchors; see `Mode`."""
        self._outer.learning_rate = self._rate  # the checkpoint has the earlier rate, and the user may change it
        self._set_anchors()

    def block(self, step: int) -> int:
        """Return the last border up to this step; see `Mode`."""
        if step <= self._first:
            return step
        return max(
            self._first, step // self._every * self._every, step // self._steps_per_epoch * self._steps_per_epoch
        )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def update(self, gradients: Sequence[tf.Tensor], apply: Apply) -> None:
        """Apply this rank's gradients and come together at a border; see `Rule`."""
        steps = tf.cast(self._optimizer.iterations.value, tf.int64) + 1
        together = steps <= self._first
        if self._first:
            gradients = tf.cond(together, lambda: self._averaged(gradients), lambda: self._checked(gradients))
        else:
            gradients = self._checked(gradients)
        apply(gradients)
        is_border = (steps % self._every == 0) | (steps % self._steps_per_epoch == 0)
        tf.cond(is_border & ~together, _done(self._come_together), lambda: self._stay_alone(together))
        if self._first:
            tf.cond(steps == self._first, _done(self._set_anchors), lambda: True)

    def _averaged(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the mean over the ranks, in float32."""
        flags = None if self._stop is None else self._stop.exchange()
        return once_all_arrived(self._dense.exchange(gradients), flags)

    def _checked(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the gradients after a check that they are finite, so that a diverging rank stops at once."""
        text = f"rank {self._exchange.collective.rank}: {GRADIENTS_NOT_FINITE}, from optimizer step"
        names = [variable.path for variable in self._weights]
        finite = check_finite(all_finite(gradients), names, text, self._optimizer.iterations.value)
        with tf.control_dependencies([finite]):
            return [tf.identity(gradient) for gradient in gradients]

    def _come_together(self) -> None:
        flags = None if self._stop is None else self._stop.exchange()
        ways = [anchor.read_value() - weight.value for anchor, weight in zip(self._anchors, self._weights, strict=True)]
        # Without a learning rate, because the weight change already includes it, and so do the residuals.
        means = once_all_arrived(self._exchange.exchange(ways), flags)
        with tf.control_dependencies(means):
            for anchor, weight in zip(self._anchors, self._weights, strict=True):
                weight.assign(anchor.read_value())
            self._outer.apply(means, self._weights)
        self._set_anchors()

    def _set_anchors(self) -> None:
        for anchor, weight in zip(self._anchors, self._weights, strict=True):
            anchor.assign(weight.value)

    def _stay_alone(self, together: tf.Tensor) -> bool:
        if self._first:
            tf.cond(together, _done(lambda: self._exchange.take_figures(self._dense)), _done(self._take_no_figures))
        else:
            self._take_no_figures()
        return True

    def _take_no_figures(self) -> None:
        self._exchange.take_figures(None)


def _done(action: Callable[[], None]) -> Callable[[], bool]:
    """Return a branch of a condition that runs an action and returns True."""

    def branch() -> bool:
        action()
        return True

    return branch


def make(inputs: ModeInputs, settings: LocalConfig) -> Mode:
    """Make the mode; see `MakeMode`."""
    exchange, optimizer = inputs.make_exchange(), inputs.make_optimizer()
    rule = LocalUpdates(
        inputs.model,
        optimizer,
        exchange,
        inputs.stop,
        steps_per_epoch=inputs.steps_per_epoch,
        **settings.arguments(),
    )
    return WholeNetworks(inputs, optimizer, exchange, rule)
