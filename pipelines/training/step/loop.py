"""One epoch of training on one rank, and the average of the statistics that each rank computes by itself."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf

from conf.sections.codecs import OVERFLOW_REMEDIES
from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE, MEANS_NOT_FINITE
from models.compression.exchange.wire import Collective
from models.schedules import Schedule
from pipelines.dataset.read.reader import Batch
from pipelines.launch.rank.report import StoppedOnRequest, step_done
from pipelines.training.checkpoint.checkpoints import REMEDY
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.step.accumulation import moving_statistics
from pipelines.training.step.clock import Clock
from pipelines.training.step.loss_scale import ranks_not_finite
from pipelines.training.step.step import Accumulate, Step
from pipelines.training.step.step_inputs import Inputs, StepInputs

_AS_IT_IS = StepInputs()
_CODEC_OF_MEANS = re.compile(rf"codec (\w+): {MEANS_NOT_FINITE}")


@dataclass(frozen=True)
class Trainer:
    """The objects that turn a batch into an update of the model on one rank."""

    step: Step
    optimizer: keras.optimizers.Optimizer
    """The optimizer whose learning rate is set before each step."""
    schedule: Schedule
    """Learning rate by optimizer step."""
    collective: HorovodCollective
    stop: StopAgreement | None = None
    """The agreement that `step` includes; None if training cannot be asked to stop."""
    accumulate: Accumulate | None = None
    """Takes all micro-batches of a step except the last; None if a step has one batch."""
    micro_batches: int = 1
    """Number of batches of this rank per step."""
    reset: Callable[[], None] = lambda: None
    """Discards the sums of an unfinished step."""
    block: Callable[[int], int] = lambda step: step
    """Returns the step at which the ranks last came together; see `pipelines.training.step.mode.Mode`."""
    ranks_per_copy: int = 1
    """Number of ranks that share one copy of the model and take the same samples."""

    @property
    def copies(self) -> int:
        """Number of copies of the model. Each copy takes different samples."""
        return self.collective.size // self.ranks_per_copy


@dataclass(frozen=True)
class LossTotal:
    """The sum and the number of the losses of an epoch's steps so far."""

    sum: float = 0.0
    count: int = 0

    def over_ranks(self, collective: HorovodCollective) -> "LossTotal":
        """Return the totals over all ranks."""
        total, count = collective.sum(np.array([self.sum, self.count], np.float64))
        return LossTotal(float(total), int(count))


@dataclass(frozen=True)
class EpochResult:
    """The result of one epoch of training; the loss is the same on every rank."""

    loss: float
    """Mean over all samples of the epoch."""
    images_per_second: float
    """Rate over all ranks. The first step compiles and is left out if there are others."""
    input_wait_fraction: float
    """Fraction of the measured time in which this rank waited for its next batch."""
    measured_steps: int = 0
    """Number of measured steps."""
    measured_seconds: float = 0.0
    """Time of the measured steps on this rank."""
    first_step_seconds: float = 0.0
    """Seconds of the first step on this rank, with the wait for its batch; 0 if it is a measured step."""

    @property
    def compile_seconds(self) -> float:
        """The extra time of the first step, which compiles in the first epoch of a process."""
        usual = self.measured_seconds / max(self.measured_steps, 1)
        return max(0.0, self.first_step_seconds - usual)


@dataclass(frozen=True)
class Progress:
    """The progress of rank 0 within an epoch."""

    step: int
    """Number of steps that this call of `train_epoch` has done."""
    loss: float
    """Latest known loss of a step on this rank."""
    images_per_second: float


class StepObserver(Protocol):
    """Receives the values of every step after its loss is known."""

    def measure(self) -> tf.Tensor:
        """Return the values to record with the loss of the latest step, without waiting for the step."""

    def record_step(self, step: int, loss: float, measured: tf.Tensor) -> None:
        """Take the values of one step: the number of steps before it, its loss on this rank, the measured values."""


class StepSaver(Protocol):
    """Writes checkpoints within an epoch; every rank makes the same calls."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` optimizer steps."""

    def save(self, step: int, losses: LossTotal, seconds: float) -> None:
        """Write a checkpoint.

        Args:
            step: Number of optimizer steps done.
            losses: Losses of the epoch on this rank.
            seconds: Time of the epoch's steps in this call of `train_epoch`, without compiling.
        """


@dataclass(frozen=True)
class StepHooks:
    """The functions and objects that are called before and after the steps of an epoch."""

    before: Callable[[int], None] = lambda step: None
    """Called before each optimizer step with the number of completed steps."""
    observer: StepObserver | None = None
    """Receives the values of every step."""
    saver: StepSaver | None = None
    """Writes checkpoints within the epoch and when training is stopped; None: there are no such checkpoints."""
    in_memory_saver: StepSaver | None = None
    """Writes in-memory checkpoints; None: there are none."""
    report: Callable[[Progress], None] = lambda progress: None
    """Called about once a second."""

    def save_where_due(self, step: int, losses: "_Losses", clock: Clock) -> None:
        """Write the checkpoints that are due after `step` optimizer steps, on disk and in memory."""
        for saver in (self.saver, self.in_memory_saver):  # the first averages statistics that the second must include
            if saver is not None and saver.is_due(step):
                losses.settle()  # a checkpoint includes no step whose loss is unknown
                saver.save(step, losses.total, clock.steady_seconds)


def train_epoch(
    batches: Iterator[Batch],
    trainer: Trainer,
    *,
    first_step: int,
    earlier: LossTotal = LossTotal(),
    inputs_of: Callable[[Batch], Inputs] = _AS_IT_IS,
    hooks: StepHooks = StepHooks(),
) -> EpochResult:
    """Run every batch of one epoch.

    Args:
        batches: This rank's batches, `trainer.micro_batches` per step; every rank has the same number.
        trainer: Turns a batch into an update.
        first_step: Number of optimizer steps before the first of these batches.
        earlier: Losses of this epoch's earlier steps over all ranks; given on one rank only.
        inputs_of: Turns a batch into the inputs of a step.
        hooks: Called before and after the steps.

    Raises:
        FloatingPointError: The loss, a gradient or the mean gradient is not finite. Names step and rank, or codec.
        StoppedOnRequest: A rank was asked to stop. A checkpoint is written if there is a saver.
    """
    losses = _Losses(trainer, first_step, earlier, hooks.observer)
    clock = Clock()
    step = first_step
    for number, batch in enumerate(batches, start=1):
        clock.batch_arrived(len(batch.rows))
        if number % trainer.micro_batches:
            assert trainer.accumulate is not None
            trainer.accumulate(*inputs_of(batch))
            if clock.is_report_due():
                step_done()  # a sign of life: a step of many micro-batches may take minutes
        else:
            hooks.before(step)
            loss = _take_step(trainer, step, inputs_of(batch), losses)
            losses.settle()  # of the previous step: waiting for the current step would keep an accelerator idle
            losses.begin(loss, wait=step == first_step)
            clock.step_done()
            step += 1
            if losses.stop_is_agreed and trainer.block(step) == step:  # a checkpoint holds what all ranks have
                break
            hooks.save_where_due(step, losses, clock)
            if clock.is_report_due():
                rate = trainer.copies * clock.images_per_second
                hooks.report(Progress(step - first_step, losses.latest, rate))
        del batch  # the reader may reuse its memory once the step has used it
        clock.begin_waiting()
    losses.settle()
    # With a parameter server, some workers may already have finished the epoch when the stop step is agreed.
    if losses.stop_is_agreed and trainer.block(step) == step:
        if hooks.saver is not None:
            hooks.saver.save(step, losses.total, clock.steady_seconds)
        raise StoppedOnRequest(f"stopped after step {step}")
    total = losses.total.over_ranks(trainer.collective)
    return EpochResult(
        total.sum / total.count,
        trainer.copies * clock.images_per_second,
        clock.wait_fraction,
        clock.steps,
        clock.seconds,
        clock.first_step_seconds,
    )


def _take_step(trainer: Trainer, step: int, inputs: Inputs, losses: "_Losses") -> tf.Tensor:
    """Start the last or only batch of one step and return the step's loss, which may not be computed yet."""
    trainer.optimizer.learning_rate = trainer.schedule(step)
    if trainer.stop is not None:
        trainer.stop.announce()
    try:
        return trainer.step(*inputs)
    except tf.errors.InvalidArgumentError as error:
        losses.settle()  # if the loss of the previous step was not finite, the error must name that step
        text = _divergence(error.message, trainer.collective.rank, step)
        if text is None:
            raise
    # Outside the handler, so that the error does not include TensorFlow's trace of the graph.
    raise FloatingPointError(text)


def _divergence(message: str, rank: int, step: int) -> str | None:
    """Return the error text for the user if an error of the exchange is a divergence; otherwise None."""
    if GRADIENTS_NOT_FINITE in message:  # with a loss scale, all ranks get this error
        return f"gradients are not finite on rank {ranks_not_finite(message) or rank} at step {step}: {REMEDY}"
    codec = _CODEC_OF_MEANS.search(message)
    if codec is None:
        return None
    name = codec[1]
    return (
        f"the mean of the gradients is not finite at step {step} after exchange.codec={name}, though every rank's own "
        f"gradients are: {OVERFLOW_REMEDIES.get(name, REMEDY)}"
    )


class _Losses:
    """The losses of an epoch's steps on this rank; the loss of the latest step is read one step later."""

    def __init__(self, trainer: Trainer, first_step: int, earlier: LossTotal, observer: StepObserver | None) -> None:
        self._trainer, self._step, self._earlier, self._observer = trainer, first_step, earlier, observer
        self._values: list[float] = []
        self._pending: tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None] | None = None
        self.stop_is_agreed = False

    def begin(self, loss: tf.Tensor, *, wait: bool) -> None:
        """Take the loss of a started step."""
        observer, stop = self._observer, self._trainer.stop
        measured = None if observer is None else observer.measure()
        self._pending = loss, measured, None if stop is None else stop.requests()
        if wait:
            float(loss)

    def settle(self) -> None:
        """Wait for the loss of the last started step, if it is unknown."""
        if self._pending is None:
            return
        (loss, measured, requests), self._pending = self._pending, None
        at = self._step + len(self._values)
        value = float(loss)
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss is {value} on rank {self._trainer.collective.rank} at step {at}: {REMEDY}"
            )
        self._values.append(value)
        if self._observer is not None:
            self._observer.record_step(at, value, measured)
        if requests is not None and float(requests) > 0:
            self.stop_is_agreed = True

    @property
    def latest(self) -> float:
        """The latest known loss."""
        return self._values[-1]

    @property
    def total(self) -> LossTotal:
        """The losses of this rank and the earlier losses of the epoch."""
        return LossTotal(self._earlier.sum + math.fsum(self._values), self._earlier.count + len(self._values))


def average_statistics(model: keras.Model, collective: Collective, averages: Sequence[keras.Variable] = ()) -> None:
    """Set the moving batch-norm statistics, which each rank computes from its own batches, to their mean over ranks.

    Args:
        model: The model with the statistics.
        collective: The ranks, which call this together.
        averages: Averages of these statistics over the steps; they are set to their mean too.
    """
    statistics = [*moving_statistics(model), *averages]
    if collective.size == 1 or not statistics:
        return
    sums = collective.allreduce([tf.convert_to_tensor(variable.value) for variable in statistics])
    for variable, total in zip(statistics, sums, strict=True):
        variable.assign(total / collective.size)
