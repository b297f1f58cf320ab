"""One step of a worker of a parameter server."""

from typing import Any

import keras
import tensorflow as tf

from models.compression.exchange.exchange import METRICS
from models.layers.grids import Size
from pipelines.training.accumulation import Accumulation
from pipelines.training.modes.parameter_server import Messages, ParameterServer
from pipelines.training.step import Images, Loss, StepClocks, make_accumulate, make_gradients


class ServerStep:
    """Fetch, gradients of this worker's batch, push: a `Step`, whose method `take` is the `Accumulate` before it.

    A step that is over before this worker has begun it (`backup`) is left out; its loss is that of the worker's latest.
    """

    def __init__(
        self,
        server: ParameterServer,
        model: keras.Model,
        loss: Loss,
        optimizer: keras.optimizers.Optimizer,
        *,
        micro_batches: int,
        jit_compile: bool,
        clocks: StepClocks | None = None,
    ) -> None:
        """Create the sums; graphs are made when they are first called.

        Args:
            server: The shards.
            model: The worker's model.
            loss: Per-sample losses `(batch,)` from targets and logits.
            optimizer: Its learning rate is that of a step of all workers.
            micro_batches: Batches of this worker per step.
            jit_compile: Whether XLA compiles forward and backward pass.
            clocks: Get the figures of each step; None: nobody asks.
        """
        self._server, self._optimizer, self._clocks = server, optimizer, clocks
        self._variables = model.trainable_variables
        self._micro_batches = Accumulation(model, micro_batches) if micro_batches > 1 else None
        self._accumulate = None
        if self._micro_batches is not None:
            self._accumulate = make_accumulate(model, loss, self._micro_batches, jit_compile=jit_compile)
        self._gradients = make_gradients(model, loss, jit_compile=jit_compile)
        self._accrued = (
            [tf.Variable(tf.zeros(each.shape), trainable=False) for each in self._variables] if server.accrues else []
        )
        self._steps = {dense: self._make_step(dense=dense, pushes=True) for dense in (False, True)}
        self._step_alone = self._make_step(dense=True, pushes=False)
        self._encode_rest = {dense: self._make_encode_rest(dense=dense) for dense in (False, True)}
        self._loss = tf.constant(0.0)

    def take(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> None:
        """Take a micro-batch that is not the last of its step; see `Accumulate`."""
        assert self._accumulate is not None
        if self._server.begin_batch():
            self._accumulate(images, targets, seeds, size)

    def __call__(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> tf.Tensor:
        """Take the last or only batch of a step, and push; see `Step`."""
        server, messages, norm = self._server, None, tf.constant(0.0)
        if server.begin_batch():
            pushes = server.is_push_due
            graph = self._steps[server.is_dense] if pushes else self._step_alone
            rates = tf.constant(float(self._optimizer.learning_rate)), tf.constant(server.own_rate())
            self._loss, norm, messages = graph(images, targets, seeds, size, tf.constant(server.steps_done), *rates)
            messages = messages if pushes else None
        server.end_step(messages)
        if self._clocks is not None:
            self._clocks.figures = self._figures(float(norm))
        return self._loss

    def come_together(self) -> None:
        """See `ParameterServer.come_together`."""
        rate = tf.constant(float(self._optimizer.learning_rate))
        step = tf.constant(self._server.steps_done)
        self._server.come_together(lambda: self._encode_rest[self._server.is_dense](step, rate))

    def reset(self) -> None:
        """Forget what an unfinished step has left."""
        self._server.reset()
        if self._micro_batches is not None:
            self._micro_batches.reset()

    @property
    def payload_bytes(self) -> int:
        """Bytes of an allreduce with the same cost as what a worker fetches and pushes in its latest step."""
        return (self._server.figures.fetched + self._server.figures.pushed) // 2

    def _make_step(self, *, dense: bool, pushes: bool) -> Any:
        server, accrued = self._server, self._accrued

        def step(
            images: Images,
            targets: tf.Tensor,
            seeds: tf.Tensor | None,
            size: Size | None,
            number: tf.Tensor,
            rate: tf.Tensor,
            own_rate: tf.Tensor,
        ) -> tuple[tf.Tensor, tf.Tensor, Messages]:
            value, gradients = self._gradients(images, targets, seeds, size)
            if self._micro_batches is not None:
                value, gradients = self._micro_batches.finish(value, gradients)
            if server.moves_own_weights:
                with tf.control_dependencies(gradients):
                    for variable, gradient in zip(self._variables, gradients, strict=True):
                        variable.assign(variable.value - own_rate * gradient)
            if accrued:
                gradients = [total.assign_add(gradient) for total, gradient in zip(accrued, gradients, strict=True)]
            if not pushes:
                return value, tf.constant(0.0), []
            messages = server.encode(gradients, number, rate, dense=dense)
            self._clear_accrued(messages)
            return value, server.residual_norm(), messages

        return tf.function(step, autograph=False)

    def _make_encode_rest(self, *, dense: bool) -> Any:
        def encode_rest(number: tf.Tensor, rate: tf.Tensor) -> Messages:
            gradients = [total.read_value() for total in self._accrued]
            messages = self._server.encode(gradients, number, rate, dense=dense)
            self._clear_accrued(messages)
            return messages

        return tf.function(encode_rest, autograph=False)

    def _clear_accrued(self, messages: Messages) -> None:
        with tf.control_dependencies(tf.nest.flatten(messages)):
            for total in self._accrued:
                total.assign(tf.zeros(total.shape))

    def _figures(self, norm: float) -> tf.Tensor:
        """The figures of `StepClocks`, in their order; shards decode and update meanwhile, on any rank."""
        figures, payload = self._server.figures, self.payload_bytes
        dense = 4 * sum(each.shape.num_elements() for each in (variable.value for variable in self._variables))
        values = {
            "payload_bytes": float(payload),
            "compression_ratio": dense / payload if payload else float("nan"),
            "residual_norm": norm,
            "encode_seconds": figures.encode_seconds,
            "collective_seconds": figures.wire_seconds,
            "decode_seconds": 0.0,
        }
        after = figures.encode_seconds + figures.wire_seconds
        return tf.constant([*(values[name] for name in METRICS), 0.0, after], tf.float64)
