"""One training step: gradients, exchange, update."""

from collections.abc import Callable, Sequence
from typing import Protocol

import keras
import tensorflow as tf

from models.compression.exchange.compatibility import check_optimizer
from models.compression.exchange.exchange import GradientExchange
from models.networks.model import inputs_of
from pipelines.training.accumulation import Accumulation
from pipelines.training.loss_scale import LossScale
from pipelines.training.stop import StopAgreement
from pipelines.training.weight_average import WeightAverage

Images = dict[str, tf.Tensor]
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Gradients = Callable[[Images, tf.Tensor, tf.Tensor | None], tuple[tf.Tensor, list[tf.Tensor]]]


class Step(Protocol):
    """One update of a model from one batch of this rank, or from the last micro-batch of a step."""

    def __call__(self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None) -> tf.Tensor:
        """Return the mean loss; `seeds` are the samples' of `models.layers.augmentation`, if the model augments."""
        ...


class Accumulate(Protocol):
    """Takes a micro-batch of this rank that is not the last of its step."""

    def __call__(self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None) -> None:
        """Add its gradients to those of the step; no rank waits for another one."""
        ...


def make_train_step(
    model: keras.Model,
    loss: Loss,
    optimizer: keras.optimizers.Optimizer,
    exchange: GradientExchange,
    *,
    jit_compile: bool,
    stop: StopAgreement | None = None,
    accumulation: Accumulation | None = None,
    loss_scale: LossScale | None = None,
    average: WeightAverage | None = None,
    rate_factors: Sequence[tuple[keras.Variable, float]] = (),
) -> Step:
    """Return the step: gradients of this rank's batch, their mean over the ranks, the optimizer's update.

    Args:
        model: Maps a dict of image groups to logits `(batch, classes)`.
        loss: Per-sample losses `(batch,)` from targets and logits.
        optimizer: The optimizer, already built for the model's trainable variables.
        exchange: Averages gradients over the ranks; its state is created here.
        jit_compile: Whether XLA compiles forward and backward pass; Horovod's operations stay outside.
        stop: The agreement on when to stop; each step includes it.
        accumulation: The sums of the step's earlier micro-batches, which `make_accumulate` fills; None if there are
            none. There is one exchange and one update per step.
        loss_scale: For half floats; a step with an overflow on any rank is skipped on all of them.
        average: Takes the weights after every update.
        rate_factors: Variables whose learning rate has a factor, each with it. What the optimizer does to them is
            multiplied: the same for every optimizer whose update is linear in the rate (all but LARS as `larc`).

    Raises:
        ValueError: Codec and optimizer do not fit each other.
    """
    variables = model.trainable_variables
    check_optimizer(exchange.codec, optimizer, warmup_steps=exchange.warmup_steps)
    exchange.build(variables)
    gradients = _gradients(model, loss, loss_scale, jit_compile=jit_compile)

    @tf.function
    def step(images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None) -> tf.Tensor:
        if stop is not None:
            stop.exchange()
        value, computed = gradients(images, targets, seeds)
        if accumulation is not None:
            value, computed = accumulation.finish(value, computed)

        def update() -> None:
            before = [tf.identity(variable.value) for variable, _ in rate_factors]
            optimizer.apply(exchange.exchange(computed, optimizer.learning_rate), variables)
            for (variable, factor), start in zip(rate_factors, before, strict=True):
                variable.assign(start + factor * (variable.value - start))
            if average is not None:
                average.update(optimizer.iterations)

        if loss_scale is None:
            update()
        else:
            loss_scale.update(computed, exchange.collective, update)
        return value

    compiled: Step = step
    return compiled


def make_accumulate(
    model: keras.Model,
    loss: Loss,
    accumulation: Accumulation,
    *,
    jit_compile: bool,
    loss_scale: LossScale | None = None,
) -> Accumulate:
    """Return the function for all micro-batches of a step but the last; the arguments are as for `make_train_step`."""
    gradients = _gradients(model, loss, loss_scale, jit_compile=jit_compile)

    @tf.function
    def accumulate(images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None) -> None:
        before = accumulation.statistics_before()
        value, computed = gradients(images, targets, seeds)
        accumulation.add(value, computed, before)

    compiled: Accumulate = accumulate
    return compiled


def _gradients(model: keras.Model, loss: Loss, loss_scale: LossScale | None, *, jit_compile: bool) -> Gradients:
    """Return the function from a batch to its mean loss and the gradients of the trainable variables."""
    variables = model.trainable_variables

    def gradients(images: Images, targets: tf.Tensor, seeds: tf.Tensor | None) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(targets, model(inputs_of(model, images), training=True, seeds=seeds)))
            scaled = value if loss_scale is None else loss_scale.multiply(value)
        computed = tape.gradient(scaled, [variable.value for variable in variables])
        return value, computed if loss_scale is None else loss_scale.divide(computed)

    # A separate function only for XLA: a function that updates state, as batch norm does, returns all gradients at its
    # end, so that the exchange could not begin during the backward pass.
    compiled: Gradients = tf.function(gradients, jit_compile=True) if jit_compile else gradients
    return compiled


def make_predict(model: keras.Model, *, jit_compile: bool) -> Callable[[Images], tf.Tensor]:
    """Return `predict(images) -> logits (batch, classes)` with the moving batch-norm statistics."""

    @tf.function(jit_compile=jit_compile)
    def predict(images: Images) -> tf.Tensor:
        return model(inputs_of(model, images), training=False)

    compiled: Callable[[Images], tf.Tensor] = predict
    return compiled
