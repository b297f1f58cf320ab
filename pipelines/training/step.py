"""One training step: gradients, exchange, update."""

from collections.abc import Callable
from typing import Protocol

import keras
import tensorflow as tf

from models.compression.exchange.compatibility import check_optimizer
from models.compression.exchange.exchange import GradientExchange
from pipelines.training.stop import StopAgreement

Images = dict[str, tf.Tensor]


class Step(Protocol):
    """One update of a model from one batch of this rank."""

    def __call__(self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None) -> tf.Tensor:
        """Return the mean loss; `seeds` are the samples' of `models.layers.augmentation`, if the model augments."""
        ...


def make_train_step(
    model: keras.Model,
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    optimizer: keras.optimizers.Optimizer,
    exchange: GradientExchange,
    *,
    jit_compile: bool,
    stop: StopAgreement | None = None,
) -> Step:
    """Return the step: gradients of this rank's batch, their mean over the ranks, the optimizer's update.

    Args:
        model: Maps a dict of image groups to logits `(batch, classes)`.
        loss: Per-sample losses `(batch,)` from targets and logits.
        optimizer: The optimizer, already built for the model's trainable variables.
        exchange: Averages gradients over the ranks; its state is created here.
        jit_compile: Whether XLA compiles forward and backward pass; Horovod's operations stay outside.
        stop: The agreement on when to stop; each step includes it.

    Raises:
        ValueError: Codec and optimizer do not fit each other.
    """
    variables = model.trainable_variables
    check_optimizer(exchange.codec, optimizer, warmup_steps=exchange.warmup_steps)
    exchange.build(variables)

    def gradients(images: Images, targets: tf.Tensor, seeds: tf.Tensor | None) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(targets, model(images, training=True, seeds=seeds)))
        return value, tape.gradient(value, [variable.value for variable in variables])

    # A separate function only for XLA: a function that updates state, as batch norm does, returns all gradients at its
    # end, so that the exchange could not begin during the backward pass.
    if jit_compile:
        gradients = tf.function(gradients, jit_compile=True)

    @tf.function
    def step(images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None) -> tf.Tensor:
        if stop is not None:
            stop.exchange()
        value, computed = gradients(images, targets, seeds)
        optimizer.apply(exchange.exchange(computed, optimizer.learning_rate), variables)
        return value

    compiled: Step = step
    return compiled


def make_predict(model: keras.Model, *, jit_compile: bool) -> Callable[[Images], tf.Tensor]:
    """Return `predict(images) -> logits (batch, classes)` with the moving batch-norm statistics."""

    @tf.function(jit_compile=jit_compile)
    def predict(images: Images) -> tf.Tensor:
        return model(images, training=False)

    compiled: Callable[[Images], tf.Tensor] = predict
    return compiled
