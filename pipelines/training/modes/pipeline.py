"""Pipelines: consecutive ranks share one copy of the network, and each rank holds one stage of it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from conf.sections.modes import PipelineConfig
from models.compression.arithmetic.graph import now
from models.compression.exchange.compatibility import check_optimizer
from models.layers.augmentation import AugmentedModel
from models.layers.grids import Size
from models.losses import Loss
from models.networks.stages import Stage, cut, parts_of_flops
from pipelines.launch.rank.report import log_to_driver
from pipelines.training.modes.border import Border, border_bytes
from pipelines.training.modes.synchronous import Synchronous
from pipelines.training.modes.ticks import Ticks, idle_formula
from pipelines.training.modes.whole_model import WholeModel
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.step.accumulation import Accumulation
from pipelines.training.step.mode import Mode, ModeInputs
from pipelines.training.step.rule import Apply, Rule
from pipelines.training.step.step import Accumulate, Images, Step, make_apply, updated
from pipelines.training.step.tensors import dense

_Passes = Callable[..., Any]


class Pipeline:
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
    (`WholeModel`). So checkpoints are the same as in synchronous training, and either mode can continue the other's.
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
            ValueError: Codec and optimizer do not fit each other.
        """
        collective = inputs.collective
        self.optimizer, self.exchange = inputs.make_optimizer(), inputs.make_exchange(collective.peers)
        self.step: Step = self
        self.accumulate: Accumulate | None = self.take
        self.shared: Sequence[keras.Variable] = ()
        self.own: Sequence[keras.Variable] = ()
        self.between: Sequence[tf.Variable] = ()
        self.come_together = WholeModel(stages, self.optimizer, collective).come_together
        self._number = collective.group.rank
        self.stage = stages[self._number]
        self.ticks = Ticks(len(stages), inputs.micro_batches)
        self._stages, self._group, self._border = stages, collective.group, Border(collective.group)
        self._clocks, self._samples = inputs.clocks, inputs.batch_size
        self._payload_bytes = _payload_bytes(stages, collective, self.ticks, self._samples)
        variables = self.stage.network.trainable_variables
        check_optimizer(self.exchange.codec, self.optimizer, warmup_steps=self.exchange.warmup_steps)
        self.exchange.build(variables)
        self._sums = Accumulation(self.stage.network, inputs.micro_batches)
        self._forward = _make_forward(self.stage, inputs.loss, self._sums, jit_compile=inputs.jit_compile)
        self._backward = _make_backward(self.stage, inputs.loss, self._sums, jit_compile=inputs.jit_compile)
        own = {id(variable) for variable in variables}
        factors = [(variable, factor) for variable, factor in inputs.rate_factors if id(variable) in own]
        apply = make_apply(self.optimizer, variables, rate_factors=factors, clocks=self._clocks)
        self._update = self._make_update(Synchronous(self.optimizer, self.exchange, inputs.stop), apply)
        self._busy = self._all = 0
        self.reset()

    def begin(self, step: int) -> None:
        """Do nothing, because the pipelines always have the same weights."""

    def block(self, step: int) -> int:
        """Return `step`, because the pipelines come together in every step; see `Mode`."""
        return step

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
        received = self._border.pass_on(sent, here + 1, arrives, self._samples, "pipeline_forward")
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
        received = self._border.pass_on(sent, here - 1, arrives, self._samples, "pipeline_backward")
        if comes is not None:
            self._gradients[comes] = received

    def _count(self, micro_batch: int | None) -> None:
        self._busy += micro_batch is not None
        self._all += 1

    def _make_update(self, rule: Rule, apply: Apply) -> Callable[[], Any]:
        """Return the function for the end of a step: the loss on each rank of the pipeline, and this stage's update."""
        sums, group, clocks, payload = self._sums, self._group, self._clocks, self._payload_bytes
        exchange = self.exchange
        variables = self.stage.network.trainable_variables

        @tf.function
        def update() -> Any:
            rule.begin_step()
            loss, gradients = sums.mean()
            loss = group.sum(loss, "pipeline_loss")  # the loss is 0 on all stages but the last
            rule.update(gradients, apply)
            if clocks is None:
                return loss
            measured = clocks.measure(exchange, updated(variables) - now(gradients))
            return loss, tf.concat([[payload], measured[1:]], 0)  # the exchange knows its own bytes only

        compiled: Callable[[], Any] = update  # tf.function is not typed
        return compiled


def _make_forward(stage: Stage, loss: Loss, sums: Accumulation, *, jit_compile: bool) -> _Passes:
    """Return the function that computes a micro-batch and returns only the loss or the tensor at the cut."""

    def outputs(inputs: Any, targets: tf.Tensor | None, seeds: tf.Tensor | None) -> tf.Tensor:
        return _outputs(stage, loss, inputs, targets, seeds)

    compute = tf.function(outputs, jit_compile=True) if jit_compile else outputs

    @tf.function
    def forward(inputs: Any, targets: tf.Tensor | None, seeds: tf.Tensor | None) -> tf.Tensor:
        before = sums.statistics_before()
        found = compute(inputs, targets, seeds)
        sums.put_back(before)  # the backward clock repeats the computation and updates the statistics
        return found

    compiled: Callable[..., Any] = forward  # tf.function is not typed
    return compiled


def _make_backward(stage: Stage, loss: Loss, sums: Accumulation, *, jit_compile: bool) -> _Passes:
    """Return the function that computes a micro-batch again, adds its gradients and returns the inputs' gradient."""
    variables = stage.network.trainable_variables

    def gradients(
        inputs: Any, targets: tf.Tensor | None, seeds: tf.Tensor | None, upstream: tf.Tensor | None
    ) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            if not stage.is_first:
                tape.watch(inputs)
            found = _outputs(stage, loss, inputs, targets, seeds)
        sources = [*([] if stage.is_first else [inputs]), *(variable.value for variable in variables)]
        computed = dense(tape.gradient(found, sources, output_gradients=upstream))
        return (None, computed) if stage.is_first else (computed[0], computed[1:])

    compute = tf.function(gradients, jit_compile=True) if jit_compile else gradients

    @tf.function
    def backward(
        inputs: Any,
        targets: tf.Tensor | None,
        seeds: tf.Tensor | None,
        upstream: tf.Tensor | None,
        value: tf.Tensor,
    ) -> tf.Tensor | None:
        before = sums.statistics_before()
        of_inputs, computed = compute(inputs, targets, seeds, upstream)
        sums.add(value, computed, before)
        return of_inputs

    compiled: Callable[..., Any] = backward  # tf.function is not typed
    return compiled


def _outputs(stage: Stage, loss: Loss, inputs: Any, targets: tf.Tensor | None, seeds: tf.Tensor | None) -> tf.Tensor:
    found = stage(inputs, seeds)
    return tf.reduce_mean(loss(targets, found)) if stage.is_last else found


def _payload_bytes(stages: Sequence[Stage], collective: HorovodCollective, ticks: Ticks, samples: int) -> float:
    """Return the payload of an allreduce over N ranks that sends as many bytes as a step: their sum / (2 (N - 1)).

    between pipelines: 2 (G - 1) * bytes of all gradients,    G pipelines
    between stages:    2 G M * bytes of a micro-batch at all cuts
    """
    weights: int = 4 * sum(math.prod(each.shape) for stage in stages for each in stage.network.trainable_variables)
    pipelines = collective.size // len(stages)
    between = ticks.micro_batches * border_bytes([stage.border for stage in stages[:-1]], samples)
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
