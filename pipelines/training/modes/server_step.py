"""A step of a worker of a parameter server."""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from conf.sections.modes import ParameterServerConfig
from models.compression.codecs.none import NoneCodec
from models.compression.exchange.figures import ExchangeFigures
from models.layers.grids import Size
from pipelines.training.modes.parameter_server import Messages, ParameterServer
from pipelines.training.step.accumulation import Accumulation
from pipelines.training.step.loop import average_statistics
from pipelines.training.step.mode import Mode, ModeInputs
from pipelines.training.step.step import Accumulate, Images, Step, make_accumulate, make_gradients


class ServerStep:
    """The `Mode` and its `Step`: fetch, gradients of this worker's batch, push.

    With `backup`, a worker skips a step that is complete before the worker starts it. The loss of a skipped step is
    that of the worker's latest step.
    """

    def __init__(self, inputs: ModeInputs, settings: ParameterServerConfig) -> None:
        """Serve this rank's shard and create the sums; graphs are made when they are first called."""
        self._inputs, self._clocks = inputs, inputs.clocks
        # Workers push gradients that the configured codec has encoded, and exchange nothing.
        self.exchange, self.optimizer = inputs.make_exchange(codec=NoneCodec()), inputs.make_optimizer()
        self.server = server = ParameterServer(
            inputs.model,
            self.optimizer,
            self.exchange,
            inputs.stop,
            copy_optimizer=inputs.copy_optimizer,
            codec=inputs.make_codec(),
            **settings.arguments(),
        )
        self.step: Step = self
        self.shared: Sequence[keras.Variable] = ()
        self.own, self.between = server.own, server.between
        self.begin, self.block = server.begin, server.block
        self._variables = inputs.model.trainable_variables
        self._sums = Accumulation(inputs.model, inputs.micro_batches)
        self._accumulate = make_accumulate(inputs.model, inputs.loss, self._sums, jit_compile=inputs.jit_compile)
        self.accumulate: Accumulate | None = self.take if inputs.micro_batches > 1 else None
        self._gradients = make_gradients(inputs.model, inputs.loss, jit_compile=inputs.jit_compile)
        self._accrued = (
            [tf.Variable(tf.zeros(each.shape), trainable=False) for each in self._variables] if server.accrues else []
        )
        self._step_graph = tf.function(self._take_batch, autograph=False)
        self._rest_graph = tf.function(self._encode_rest, autograph=False)
        self._loss = tf.constant(0.0)

    def take(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> None:
        """Take a micro-batch that is not the last of its step; see `Accumulate`."""
        if self.server.begin_batch():
            self._accumulate(images, targets, seeds, size)

    def __call__(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> tf.Tensor:
        """Take the last or only batch of a step and push; see `Step`."""
        server, messages, norm = self.server, None, tf.constant(0.0)
        if server.begin_batch():
            pushes = server.is_push_due
            dense = server.is_dense if pushes else None
            rates = tf.constant(float(self.optimizer.learning_rate)), tf.constant(server.own_rate())
            self._loss, norm, messages = self._step_graph(
                images, targets, seeds, size, tf.constant(server.steps_done), *rates, dense=dense
            )
            messages = messages if pushes else None
        server.end_step(messages)
        if self._clocks is not None:
            self._clocks.figures = self._figures(float(norm))
        return self._loss

    def come_together(self) -> None:
        """Give all ranks weights and state of all shards, and the mean of the statistics; see `Mode`."""
        step, rate = tf.constant(self.server.steps_done), tf.constant(float(self.optimizer.learning_rate))
        self.server.come_together(lambda: self._rest_graph(step, rate, dense=self.server.is_dense))
        average_statistics(self._inputs.model, self._inputs.collective)

    def figures(self) -> dict[str, float]:
        """Return the metrics of `ParameterServer.take_counts`."""
        return self.server.take_counts()

    def reset(self) -> None:
        """Discard the unfinished step; see `Mode`."""
        self.server.reset()
        self._sums.reset()

    def payload_bytes(self) -> int:
        """Return the payload of an allreduce that costs as much as fetch and push of the worker's latest step."""
        return (self.server.figures.fetched + self.server.figures.pushed) // 2

    def _take_batch(
        self,
        images: Images,
        targets: tf.Tensor,
        seeds: tf.Tensor | None,
        size: Size | None,
        number: tf.Tensor,
        rate: tf.Tensor,
        own_rate: tf.Tensor,
        *,
        dense: bool | None,
    ) -> tuple[tf.Tensor, tf.Tensor, Messages]:
        """Return loss, norm of the residual and push of the last batch of a step; part of a graph.

        `dense` says whether the push is in float32; None: nothing is pushed.
        """
        value, gradients = self._sums.finish(*self._gradients(images, targets, seeds, size))
        if self.server.moves_own_weights:
            with tf.control_dependencies(gradients):
                for variable, gradient in zip(self._variables, gradients, strict=True):
                    variable.assign(variable.value - own_rate * gradient)
        if self._accrued:
            gradients = [total.assign_add(gradient) for total, gradient in zip(self._accrued, gradients, strict=True)]
        if dense is None:
            return value, tf.constant(0.0), []
        messages = self.server.encode(gradients, number, rate, dense=dense)
        self._clear_accrued(messages)
        return value, self.server.residual_norm(), messages

    def _encode_rest(self, number: tf.Tensor, rate: tf.Tensor, *, dense: bool) -> Messages:
        """Return the push of the accrued gradients; part of a graph."""
        messages = self.server.encode([total.read_value() for total in self._accrued], number, rate, dense=dense)
        self._clear_accrued(messages)
        return messages

    def _clear_accrued(self, messages: Messages) -> None:
        with tf.control_dependencies(tf.nest.flatten(messages)):
            for total in self._accrued:
                total.assign(tf.zeros(total.shape))

    def _figures(self, norm: float) -> tf.Tensor:
        """Return the row of `StepClocks.figures`; shards decode and update at the same time, on any rank."""
        figures, payload = self.server.figures, self.payload_bytes()
        dense = 4 * sum(each.shape.num_elements() for each in (variable.value for variable in self._variables))
        exchange = ExchangeFigures(
            payload_bytes=payload,
            compression_ratio=dense / payload if payload else math.nan,
            residual_norm=norm,
            encode_seconds=figures.encode_seconds,
            collective_seconds=figures.wire_seconds,
            decode_seconds=0.0,
        )
        # The update takes no time here. What follows the last gradient is the push.
        return tf.constant([*exchange, 0.0, figures.encode_seconds + figures.wire_seconds], tf.float64)


def make(inputs: ModeInputs, settings: ParameterServerConfig) -> Mode:
    """Make the mode; see `MakeMode`."""
    return ServerStep(inputs, settings)
