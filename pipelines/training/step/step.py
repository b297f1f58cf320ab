"""A training step: gradients, exchange, update."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras
import tensorflow as tf

from models.compression.arithmetic.graph import Marks, now
from models.compression.exchange.compatibility import check_optimizer
from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.figures import ExchangeFigures
from models.layers.grids import Size
from models.layers.resolution import training_size
from models.networks.model import inputs_of
from pipelines.training.step.accumulation import Accumulation
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.rule import Apply, Rule
from pipelines.training.step.weight_average import WeightAverage

Images = dict[str, tf.Tensor]
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Gradients = Callable[[Images, tf.Tensor, tf.Tensor | None, Size | None], tuple[tf.Tensor, list[tf.Tensor]]]


class StepFigures(NamedTuple):
    """Figures of one step on one rank."""

    exchange: ExchangeFigures
    optimizer_seconds: float
    """Seconds from the last mean to the end of the optimizer's update."""
    after_gradients_seconds: float
    """Seconds from the last gradient to the end of the step: the update, and communication that nothing hides."""

    @classmethod
    def from_row(cls, row: Iterable[float]) -> "StepFigures":
        """Return the figures from `StepClocks.figures`."""
        *exchange, optimizer, after_gradients = row
        return cls(ExchangeFigures(*exchange), optimizer, after_gradients)


class StepClocks:
    """The figures of the latest step on this rank; its seconds are meaningful on a CPU."""

    def __init__(self) -> None:
        """Create the variable."""
        self.update = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="update_seconds")
        """Seconds from the last mean to the end of the optimizer's update. A skipped step does not change it."""
        self.figures = tf.zeros(len(ExchangeFigures._fields) + 2, tf.float64)
        """The row of `StepFigures` of the latest step, which may not have computed it yet."""

    def measure(self, exchange: GradientExchange, after_gradients: tf.Tensor) -> tf.Tensor:
        """Return the figures at the end of a step; part of its graph."""
        # Any free thread reads the clock of the last gradient, so in a small model its time may be the later one.
        after_gradients = tf.maximum(after_gradients, 0.0)
        return tf.concat([exchange.measure(), [self.update, after_gradients]], 0)


class Step(Protocol):
    """One update of a model from one batch of this rank, or from the last micro-batch of a step."""

    def __call__(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> tf.Tensor:
        """Return the mean loss.

        Args:
            images: Image groups by name, at full size.
            targets: Targets of the samples.
            seeds: Seeds of the samples, as `models.layers.augmentation` has them, if the model augments.
            size: Size to which the model resizes the images, if it does. A step is compiled once per size.
        """


@runtime_checkable
class Traceable(Protocol):
    """A step, or a function for micro-batches, that is a graph or has one."""

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""

    def get_concrete_function(self, *inputs: Any) -> object:
        """Trace the graph for inputs of this shape and type."""


class Accumulate(Protocol):
    """Takes a micro-batch of this rank that is not the last of its step; the arguments are those of `Step`."""

    def __call__(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> None:
        """Add the gradients to those of the step; no rank waits for another one."""


@dataclass(frozen=True)
class MeasuredStep:
    """A `Step` whose graph returns loss and figures; reading the figures from a variable took 0.35 ms per step."""

    graph: tf.types.experimental.PolymorphicFunction
    """Returns the loss and the figures."""
    clocks: StepClocks

    def __call__(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> tf.Tensor:
        """See `Step`."""
        loss, self.clocks.figures = self.graph(images, targets, seeds, size)
        return loss

    def get_concrete_function(self, *inputs: Any) -> object:
        """See `Traceable`."""
        return self.graph.get_concrete_function(*inputs)


def make_train_step(
    model: keras.Model,
    loss: Loss,
    optimizer: keras.optimizers.Optimizer,
    exchange: GradientExchange,
    rule: Rule,
    *,
    jit_compile: bool,
    accumulation: Accumulation | None = None,
    loss_scale: LossScale | None = None,
    average: WeightAverage | None = None,
    rate_factors: Sequence[tuple[keras.Variable, float]] = (),
    clocks: StepClocks | None = None,
) -> Step:
    """Return the step: gradients of this rank's batch, and the update by a rule.

    If the exchange has marks, the step writes the times of its parts to them. Forward and backward pass have the phase
    `compute` (one part if XLA compiles them), the update has the phase `optimizer`.

    Args:
        model: Maps a dict of image groups to logits `(batch, classes)`.
        loss: Per-sample losses `(batch,)` from targets and logits.
        optimizer: The optimizer, already built for the model's trainable variables.
        exchange: The exchange that the rule uses; its state is created here.
        rule: Decides how the gradients are applied.
        jit_compile: Whether XLA compiles forward and backward pass; Horovod's operations stay outside.
        accumulation: The sums of the step's earlier micro-batches, which `make_accumulate` fills; None if there are
            none. There is one exchange and one update per step.
        loss_scale: Scale of the loss for half floats. All ranks skip a step with an overflow on any rank.
        average: Takes the weights after every update.
        rate_factors: Variables whose learning rate has a factor, each with its factor. Their update is multiplied by
            it. This is exact for every optimizer whose update is linear in the rate. LARS as `larc` is not linear, and
            the configuration refuses it.
        clocks: Receive the figures of each step; None: figures are not measured.

    Raises:
        ValueError: Codec and optimizer do not fit each other.
    """
    variables = model.trainable_variables
    check_optimizer(exchange.codec, optimizer, warmup_steps=exchange.warmup_steps)
    exchange.build(variables)
    gradients = make_gradients(model, loss, loss_scale, jit_compile=jit_compile)
    marks = exchange.marks
    apply = make_apply(optimizer, variables, rate_factors=rate_factors, average=average, clocks=clocks, marks=marks)

    @tf.function
    def step(images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None) -> Any:
        rule.begin_step()
        began = None
        if marks is not None:
            began = now([images, targets])
            with tf.control_dependencies([began]):
                images = tf.nest.map_structure(tf.identity, images)
        value, computed = gradients(images, targets, seeds, size)
        if marks is not None:
            _mark_passes(marks, began, value, computed, together=jit_compile)
        if accumulation is not None:
            value, computed = accumulation.finish(value, computed)
        if loss_scale is None:
            rule.update(computed, apply)
        else:
            loss_scale.update(computed, exchange.collective, lambda: rule.update(computed, apply))
        if clocks is None:
            return value
        return value, clocks.measure(exchange, updated(variables) - now(computed))

    return step if clocks is None else MeasuredStep(step, clocks)


def make_apply(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    *,
    rate_factors: Sequence[tuple[keras.Variable, float]] = (),
    average: WeightAverage | None = None,
    clocks: StepClocks | None = None,
    marks: Marks | None = None,
) -> Apply:
    """Return the update from one mean gradient per variable; for the arguments see `make_train_step`."""

    @tf.autograph.experimental.do_not_convert
    def apply(means: Sequence[tf.Tensor]) -> None:
        before = [tf.identity(variable.value) for variable, _ in rate_factors]
        with tf.control_dependencies(means):  # weight decay needs no mean and would otherwise not wait for them
            optimizer.apply(means, variables)
        for (variable, factor), start in zip(rate_factors, before, strict=True):
            variable.assign(start + factor * (variable.value - start))
        if average is not None:
            average.update(optimizer.iterations)
        if clocks is not None:
            clocks.update.assign(updated(variables) - now(means))
        if marks is not None:
            marks.add("optimizer", "update", now(means), updated(variables))

    return apply  # type: ignore[no-any-return]  # the decorator is not typed


def _mark_passes(
    marks: Marks, began: tf.Tensor | None, loss: tf.Tensor, gradients: Sequence[tf.Tensor], *, together: bool
) -> None:
    """Add forward and backward pass to the marks; XLA returns loss and gradients at the same time."""
    if together:
        marks.add("compute", "forward and backward pass", began, now(gradients))
    else:
        forward = tf.minimum(now([loss]), now(gradients))
        marks.add("compute", "forward pass", began, forward)
        marks.add("compute", "backward pass", forward, now(gradients))


def updated(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Return the time at which all previous changes to these variables are done."""
    return now([tf.convert_to_tensor(variable.value) for variable in variables])


def make_accumulate(
    model: keras.Model,
    loss: Loss,
    accumulation: Accumulation,
    *,
    jit_compile: bool,
    loss_scale: LossScale | None = None,
) -> Accumulate:
    """Return the function for all micro-batches of a step except the last; for arguments see `make_train_step`."""
    gradients = make_gradients(model, loss, loss_scale, jit_compile=jit_compile)

    def accumulate(
        images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> None:
        before = accumulation.statistics_before()
        value, computed = gradients(images, targets, seeds, size)
        accumulation.add(value, computed, before)

    return tf.function(accumulate)  # type: ignore[no-any-return]  # tf.function is not typed


def make_gradients(
    model: keras.Model, loss: Loss, loss_scale: LossScale | None = None, *, jit_compile: bool
) -> Gradients:
    """Return the function from a batch to its mean loss and the gradients of the trainable variables."""
    variables = model.trainable_variables

    def gradients(
        images: Images, targets: tf.Tensor, seeds: tf.Tensor | None, size: Size | None
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape, training_size(size):
            # A model that does not use seeds does not have this argument.
            drawn = {} if seeds is None else {"seeds": seeds}
            value = tf.reduce_mean(loss(targets, model(inputs_of(model, images), training=True, **drawn)))
            scaled = value if loss_scale is None else loss_scale.multiply(value)
        computed = dense(tape.gradient(scaled, [variable.value for variable in variables]))
        return value, computed if loss_scale is None else loss_scale.divide(computed)

    # A separate function is used only for XLA. A function that updates state, as batch norm does, returns all gradients
    # at its end. The exchange could then not start during the backward pass.
    return tf.function(gradients, jit_compile=True) if jit_compile else gradients


def dense(gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[tf.Tensor | None]:
    """Convert gradients to dense tensors; lookups in a table, as in embeddings, give slices.

    An exchange needs all tensors in one order with known shapes, and XLA does not support slices.
    """
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def make_predict(model: keras.Model, *, jit_compile: bool) -> Callable[[Images], tf.Tensor]:
    """Return `predict(images) -> logits (batch, classes)` with the moving batch-norm statistics."""

    def predict(images: Images) -> tf.Tensor:
        return model(inputs_of(model, images), training=False)

    return tf.function(predict, jit_compile=jit_compile)  # type: ignore[no-any-return]  # tf.function is not typed
