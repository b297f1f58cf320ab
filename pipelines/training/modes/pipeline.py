"""Pipelines: consecutive ranks share one copy of the network, and each rank holds one stage of it."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from conf.sections.modes import PipelineConfig
from models.compression.arithmetic.graph import now
from models.compression.exchange.compatibility import check_optimizer
from models.layers.augmentation import AugmentedModel
from models.layers.grids import Size
from models.networks.stages import Stage, cut, parts_of_flops
from pipelines.launch.rank.report import log_to_driver
from pipelines.training.modes.optimizer_state import state_of
from pipelines.training.modes.synchronous import Synchronous
from pipelines.training.modes.ticks import Ticks, idle_formula
from pipelines.training.ranks.collective import HorovodCollective, HorovodGroup
from pipelines.training.step.accumulation import Accumulation
from pipelines.training.step.loop import average_statistics
from pipelines.training.step.mode import Mode, ModeInputs
from pipelines.training.step.step import Accumulate, Images, Step, dense, make_apply, updated


class Pipeline(Mode):
    """The `Mode` and its `Step` of this rank's stage of a pipeline.

        forward clock:   x(s+1, m) = stage s of x(s, m);  activations inside the stage are discarded
        backward clock:  stage s of x(s, m) once more, then dx(s, m) and dw(s, m) from dx(s+1, m)
        end of a step:   the mean of dw(s) over the micro-batches, and over the same stage of all pipelines; update

    N ranks are G = N / S pipelines of S consecutive ranks. A pipeline takes the samples that one of G ranks has in
    synchronous training, in M micro-batches. Its gradients are those of that rank. A stage computes one micro-batch per
    tick. The forward clock ticks when a micro-batch arrives, and by itself after the last one. Every stage is idle in
    S - 1 of M + S - 1 ticks of both clocks, which `figures` counts. The last stage also computes in the forward clock,
    to get the loss.

    A rank holds the activations of one micro-batch inside its stage, and the stage's gradients. It also holds the
    tensors of all M micro-batches at the cut before its stage. It holds all weights and the optimizer's state for all
    of them, but updates only those of its stage. Before validation and checkpoints every rank gets the other stages
    (`come_together`). So checkpoints are the same as in synchronous training, and either mode can continue the other's.
    All ranks of a pipeline read its samples.

    When it pays: if one micro-batch's activations of the whole network exceed a rank's memory, and smaller
    micro-batches are too small for batch norm. When not: whenever the activations fit. A data-parallel rank is never
    idle, and computes 3 parts per sample (forward 1, backward 2), while a stage computes 4. By operations alone, a
    pipeline has 3 M / (4 (M + S - 1)) of its speed. That is 60 % with 2 stages and 4 micro-batches. Measured for this
    case: 2.9 s per step and 763 MiB on the rank with the largest memory. Data-parallel ranks took 2.1 s and 1,128 MiB.
    Network: ResNet-50 of 12 bands, 60 x 60 pixels, 64 samples per step in micro-batches of 16. Machine: two ranks of
    one thread on 2 cores with other work. The ranks' memory before the network was made is left out.

    Source: Huang et al. 2019, "GPipe", sections 2.2 and 2.3. Batch norm uses the statistics of each micro-batch, as
    there. Differs: the moving statistics are the mean of those after each micro-batch, as in `Accumulation`. The
    tensors of all ranks of a pipeline are sent in one alltoall per tick, so all stages tick together.
    """

    def __init__(self, inputs: ModeInputs, stages: Sequence[Stage]) -> None:
        """Create the sums; graphs are made when they are first called.

        Args:
            inputs: The inputs of the mode; each group of its collective has one rank per stage.
            stages: All stages of the network.

        Raises:
            ValueError: Codec and optimizer do not fit each other, or a variable of the optimizer belongs to no variable
                of the network.
        """
        collective = inputs.collective
        self.optimizer, self.exchange = inputs.make_optimizer(), inputs.make_exchange(collective.peers)
        self.step: Step = self
        self.accumulate: Accumulate | None = self.take
        self._number = collective.group.rank
        self.stage = stages[self._number]
        self.ticks = Ticks(len(stages), inputs.micro_batches)
        trained = [variable for stage in stages for variable in stage.network.trainable_variables]
        self._of_stages = [
            [*stage.network.variables, *state_of(stage.network.trainable_variables, trained, self.optimizer)]
            for stage in stages
        ]
        self._stages, self._collective, self._group = stages, collective, collective.group
        self._loss, self._clocks, self._samples = inputs.loss, inputs.clocks, inputs.batch_size
        self._payload_bytes = _payload_bytes(stages, collective, self.ticks, self._samples)
        variables = self.stage.network.trainable_variables
        check_optimizer(self.exchange.codec, self.optimizer, warmup_steps=self.exchange.warmup_steps)
        self.exchange.build(variables)
        self._sums = Accumulation(self.stage.network, inputs.micro_batches)
        # XLA compiles forward and backward pass only; Horovod's operations and the sums stay outside.
        self._compute, self._differentiate = self._outputs, self._gradients_of
        if inputs.jit_compile:
            self._compute = tf.function(self._outputs, jit_compile=True)
            self._differentiate = tf.function(self._gradients_of, jit_compile=True)
        own = {id(variable) for variable in variables}
        factors = [(variable, factor) for variable, factor in inputs.rate_factors if id(variable) in own]
        self._apply = make_apply(self.optimizer, variables, rate_factors=factors, clocks=self._clocks)
        self._rule = Synchronous(self.optimizer, self.exchange, inputs.stop)
        self._busy = self._all = 0
        self.reset()

    def come_together(self) -> None:
        """Give every rank the whole model and the whole state of the optimizer; see `Mode`.

        The moving statistics of a stage become their mean over the stage's ranks. Weights and the optimizer's state are
        equal on these ranks, and are taken from the first pipeline.
        """
        average_statistics(self.stage.network, self._collective.peers)
        for number, variables in enumerate(self._of_stages):
            self._collective.broadcast([variable.value for variable in variables], root=number)

    def figures(self) -> dict[str, float]:
        """Return the fraction of all ticks so far in which this stage was idle."""
        return {"time/idle_share": 1.0 - self._busy / self._all if self._all else 0.0}

    def payload_bytes(self) -> int:
        """Return the payload of an allreduce over all ranks that costs as much as all messages of a step."""
        return round(self._payload_bytes)

    def reset(self) -> None:
        """Discard the unfinished step; see `Mode`."""
        self._sums.reset()
        self._begin_step()

    def take(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> None:
        """Take a micro-batch of the pipeline, in one tick; every rank of its group calls this together."""
        assert size is None, "the configuration lets pipelines train on full images only"
        if self.stage.is_first:
            self._inputs[len(self._batches)] = images
        # Only the first stage keeps images, and only the last one targets.
        self._batches.append((targets if self.stage.is_last else None, seeds))
        self._tick_forward()

    def __call__(
        self, images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
    ) -> tf.Tensor:
        """Take the last micro-batch of a step, finish both clocks and update; see `Step`."""
        self.take(images, targets, seeds, size)
        while self._tick < self.ticks.of_a_clock:
            self._tick_forward()
        for tick in range(self.ticks.of_a_clock):
            self._tick_backward(tick)
        self._begin_step()
        if self._clocks is None:
            return self._update()
        loss, self._clocks.figures = self._update()
        return loss

    def _begin_step(self) -> None:
        self._tick = 0
        self._batches: list[tuple[tf.Tensor | None, tf.Tensor | None]] = []
        self._inputs: dict[int, Any] = {}
        self._losses: dict[int, tf.Tensor] = {}
        self._gradients: dict[int, tf.Tensor] = {}

    def _tick_forward(self) -> None:
        tick, here, ticks = self._tick, self._number, self.ticks
        mine, comes = ticks.forward(tick, here), ticks.forward(tick, here - 1) if here else None
        sent = None
        if mine is not None:
            outputs = self._forward(self._inputs[mine], *self._batches[mine])
            if self.stage.is_last:
                self._losses[mine] = outputs
            else:
                sent = outputs
        self._count(mine)
        self._tick += 1
        if self._tick == ticks.of_a_clock:  # only the last stage has computed
            return
        arrives = None if comes is None else self._stages[here - 1].border
        received = _pass_on(self._group, sent, here + 1, arrives, self._samples, "pipeline_forward")
        if comes is not None:
            self._inputs[comes] = received

    def _tick_backward(self, tick: int) -> None:
        here, ticks = self._number, self.ticks
        mine = ticks.backward(tick, here)
        comes = None if self.stage.is_last else ticks.backward(tick, here + 1)
        sent = None
        if mine is not None:
            loss = self._losses.pop(mine, tf.constant(0.0))
            sent = self._backward(self._inputs.pop(mine), *self._batches[mine], self._gradients.pop(mine, None), loss)
        self._count(mine)
        if tick == ticks.of_a_clock - 1:  # only the first stage has computed
            return
        arrives = None if comes is None else self.stage.border
        received = _pass_on(self._group, sent, here - 1, arrives, self._samples, "pipeline_backward")
        if comes is not None:
            self._gradients[comes] = received

    def _count(self, micro_batch: int | None) -> None:
        self._busy += micro_batch is not None
        self._all += 1

    @tf.function
    def _forward(self, inputs: Any, targets: tf.Tensor | None, seeds: tf.Tensor | None) -> tf.Tensor:
        """Compute a micro-batch and return only the loss or the tensor at the cut."""
        before = self._sums.statistics_before()
        found = self._compute(inputs, targets, seeds)
        self._sums.put_back(before)  # the backward clock repeats the computation and updates the statistics
        return found

    @tf.function
    def _backward(
        self,
        inputs: Any,
        targets: tf.Tensor | None,
        seeds: tf.Tensor | None,
        upstream: tf.Tensor | None,
        value: tf.Tensor,
    ) -> tf.Tensor | None:
        """Compute a micro-batch again, add its gradients and return the gradient of the stage's inputs."""
        before = self._sums.statistics_before()
        of_inputs, computed = self._differentiate(inputs, targets, seeds, upstream)
        self._sums.add(value, computed, before)
        return of_inputs

    @tf.function
    def _update(self) -> Any:
        """End a step: return the loss on each rank of the pipeline, and update this stage."""
        self._rule.begin_step()
        loss, gradients = self._sums.mean()
        loss = self._group.sum(loss, "pipeline_loss")  # the loss is 0 on all stages but the last
        self._rule.update(gradients, self._apply)
        if self._clocks is None:
            return loss
        after = updated(self.stage.network.trainable_variables) - now(gradients)
        # The exchange knows its own bytes only.
        return loss, tf.concat([[self._payload_bytes], self._clocks.measure(self.exchange, after)[1:]], 0)

    def _outputs(self, inputs: Any, targets: tf.Tensor | None, seeds: tf.Tensor | None) -> tf.Tensor:
        found = self.stage(inputs, seeds)
        return tf.reduce_mean(self._loss(targets, found)) if self.stage.is_last else found

    def _gradients_of(
        self, inputs: Any, targets: tf.Tensor | None, seeds: tf.Tensor | None, upstream: tf.Tensor | None
    ) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            if not self.stage.is_first:
                tape.watch(inputs)
            found = self._outputs(inputs, targets, seeds)
        variables = [variable.value for variable in self.stage.network.trainable_variables]
        sources = variables if self.stage.is_first else [inputs, *variables]
        computed = dense(tape.gradient(found, sources, output_gradients=upstream))
        return (None, computed) if self.stage.is_first else (computed[0], computed[1:])


def _pass_on(
    group: HorovodGroup, sent: tf.Tensor | None, to: int, arrives: keras.KerasTensor | None, samples: int, name: str
) -> tf.Tensor | None:
    """Send a tensor to another stage, and return the tensor that this stage receives.

    Activations go forward, their gradients backward. In a tick every stage that has computed sends to one neighbour, in
    one alltoall of the group. Tensors are sent as bytes, so that half floats can be sent and all values arrive bit for
    bit.

    Args:
        group: The ranks of a pipeline, which are its stages; all of them make the same calls.
        sent: The tensor to send; None: nothing.
        to: Number of the receiving stage.
        arrives: Shape `(None, ...)` and dtype of the received tensor; None: nothing is received.
        samples: Number of samples in a micro-batch.
        name: Name of the operation, the same on all ranks.
    """
    message = tf.zeros([0], tf.uint8) if sent is None else tf.reshape(tf.bitcast(sent, tf.uint8), [-1])
    lengths = [0] * group.size
    if sent is not None:
        lengths[to] = int(message.shape[0])
    received = group.alltoall(message, tf.constant(lengths, tf.int32), name)
    if arrives is None:
        return None
    dtype = tf.as_dtype(arrives.dtype)
    return tf.bitcast(tf.reshape(received, (samples, *arrives.shape[1:], dtype.size)), dtype)


def _payload_bytes(stages: Sequence[Stage], collective: HorovodCollective, ticks: Ticks, samples: int) -> float:
    """Return the payload of an allreduce over N ranks that sends as many bytes as a step: their sum / (2 (N - 1)).

    between pipelines: 2 (G - 1) * bytes of all gradients,    G pipelines
    between stages:    2 G M * bytes of a micro-batch at all cuts
    """
    weights: int = 4 * sum(math.prod(each.shape) for stage in stages for each in stage.network.trainable_variables)
    pipelines = collective.size // len(stages)
    cuts = [stage.border for stage in stages[:-1]]
    of_sample: int = sum(math.prod(each.shape[1:]) * tf.as_dtype(each.dtype).size for each in cuts)
    between = ticks.micro_batches * samples * of_sample
    return ((pipelines - 1) * weights + pipelines * between) / (collective.size - 1)


def make(inputs: ModeInputs, settings: PipelineConfig) -> Mode:
    """Make the mode; see `MakeMode`. Rank 0 logs where the network is cut, and how long a stage is idle."""
    stages = cut(inputs.model, settings.stages)
    if inputs.collective.rank == 0:
        places = ", ".join(stage.last_layer for stage in stages[:-1])
        parts = ", ".join(f"{part:.0%}" for part in parts_of_flops(stages))
        idle = idle_formula(len(stages), inputs.micro_batches)
        log_to_driver(
            f"the network is cut into {len(stages)} stages after {places}: {parts} of the operations; with "
            f"{inputs.micro_batches} micro-batches a stage is idle in {idle:.0%} of the ticks"
        )
    return Pipeline(inputs, stages)


def check_model(model: keras.Model, settings: PipelineConfig, samples: tuple[dict[str, Any], Any]) -> None:
    """Check that the network can be cut, and that the first stage can augment a batch twice; see `MakeMode`."""
    if isinstance(model, AugmentedModel) and model.augmentation is not None:
        _check_repeats(model.augmentation, samples)
    try:
        cut(model, settings.stages)
    except ValueError as error:
        raise ValueError(f"training.mode.stages={settings.stages}: {error}, or set training.mode=synchronous") from None


def _check_repeats(augmentation: Any, samples: tuple[dict[str, Any], Any]) -> None:
    """Refuse an augmentation that draws from a state, because the first stage calls it twice per batch."""
    zeros, seeds = samples
    random = np.random.default_rng(0)
    noise = {name: tf.constant(random.integers(0, 100, each.shape), each.dtype) for name, each in zeros.items()}
    once, again = (augmentation.call(noise, seeds, training=True) for _ in range(2))
    if any(not np.array_equal(once[name], again[name]) for name in noise):
        raise ValueError(
            "input.augmentation gives other images for the same images and seeds, and with training.mode=pipeline the "
            "first stage computes each batch twice: draw from the seeds, or set training.mode=synchronous"
        )
