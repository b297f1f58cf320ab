"""One epoch of training on one rank, and what makes the ranks' models one again."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from models.schedules import Schedule
from pipelines.dataset.reader import Batch
from pipelines.training.collective import HorovodCollective
from pipelines.training.step import Step
from pipelines.training.tensors import image_tensors

_SECONDS_BETWEEN_REPORTS = 1.0
_NOT_FINITE = "gradients are not finite"
_REMEDY = "lower optimizer.learning_rate_per_256 or raise schedule.warmup_epochs"


@dataclass(frozen=True)
class EpochResult:
    """What one epoch's training gave, the same on every rank."""

    loss: float
    """Mean over all samples of the epoch."""
    images_per_second: float
    """Over all ranks; the first step, which compiles, is left out where there are others."""
    input_wait_fraction: float
    """Part of that time in which this rank waited for its next batch."""


@dataclass(frozen=True)
class Progress:
    """Where rank 0 stands within an epoch."""

    step: int
    """Steps of this epoch done."""
    loss: float
    """Of the latest step that was waited for, on this rank."""
    images_per_second: float


class Watch(Protocol):
    """Who is told of every step, once its loss is known."""

    def measure(self) -> tf.Tensor:
        """What is to be told beside the loss of the step that was begun last; must not wait for it."""
        ...

    def tell(self, step: int, loss: float, measured: tf.Tensor) -> None:
        """Take what is known of one step: optimizer steps done before it, its loss on this rank, what was measured."""
        ...


def train_epoch(
    batches: Iterator[Batch],
    step: Step,
    optimizer: keras.optimizers.Optimizer,
    schedule: Schedule,
    collective: HorovodCollective,
    *,
    first_step: int,
    seeds_of: Callable[[NDArray[np.int64]], NDArray[np.int32]] | None = None,
    earlier: tuple[float, int] = (0.0, 0),
    checkpoint_every: int | None = None,
    checkpoint: Callable[[int, float, int], None] = lambda step, loss_sum, loss_count: None,
    report: Callable[[Progress], None],
    watch: Watch | None = None,
) -> EpochResult:
    """Run every batch of one epoch.

    Args:
        batches: This rank's batches; every rank has equally many.
        step: One update.
        optimizer: Whose learning rate is set before each step.
        schedule: Learning rate by optimizer step.
        collective: All ranks.
        first_step: Optimizer steps done before the first of these batches.
        seeds_of: From the rows of a batch to the seeds of their augmentation; None: the model has none.
        earlier: Sum and number of the losses, over all ranks, of this epoch's steps before; on one rank only.
        checkpoint_every: Steps from checkpoint to checkpoint; None: there is none within an epoch.
        checkpoint: Called on every rank with the optimizer steps done, and this rank's losses' sum and number.
        report: Called about once a second.
        watch: Is told of every step.

    Raises:
        FloatingPointError: The loss or a gradient is not finite; names rank and step.
    """
    losses: list[float] = []
    pending: tuple[tf.Tensor, tf.Tensor | None] | None = None

    def settle() -> None:
        if pending is None:
            return
        (loss, measured), at = pending, first_step + len(losses)
        losses.append(_finite(float(loss), collective.rank, at))
        if watch is not None:
            watch.tell(at, losses[-1], measured)

    clock = _Clock()
    reported = time.perf_counter()
    done = first_step
    for batch in batches:
        clock.batch_is_there()
        optimizer.learning_rate = schedule(done)
        seeds = None if seeds_of is None else tf.convert_to_tensor(seeds_of(batch.rows))
        try:
            result = step(image_tensors(batch.images), tf.convert_to_tensor(batch.targets, tf.float32), seeds)
        except tf.errors.InvalidArgumentError as error:
            settle()  # where the loss before was not finite already, it is the one to name
            if _NOT_FINITE not in error.message:
                raise
            raise FloatingPointError(
                f"gradients are not finite on rank {collective.rank} at step {done}: {_REMEDY}"
            ) from error
        # The loss of the step before: waiting for this one's would keep an accelerator idle.
        settle()
        pending = result, None if watch is None else watch.measure()
        if done == first_step:
            float(result)
        clock.step_is_done(len(batch.rows))
        done += 1
        if checkpoint_every is not None and done % checkpoint_every == 0:
            settle()  # a checkpoint holds no step whose loss has not been seen to be finite
            pending = None
            checkpoint(done, earlier[0] + math.fsum(losses), earlier[1] + len(losses))
        if clock.measures and time.perf_counter() - reported >= _SECONDS_BETWEEN_REPORTS:
            reported = time.perf_counter()
            report(Progress(done - first_step, losses[-1], collective.size * clock.images_per_second))
        del batch  # its memory is free for the reader when the step has used it
        clock.waits()
    settle()
    rate, wait_fraction = clock.images_per_second, clock.wait_fraction
    total, count = collective.sum(np.array([earlier[0] + math.fsum(losses), earlier[1] + len(losses)], np.float64))
    return EpochResult(float(total / count), collective.size * rate, wait_fraction)


class _Clock:
    """Images and seconds of one rank's epoch; the first step, which compiles, is left out where there are others."""

    def __init__(self) -> None:
        self._started = self._ready = time.perf_counter()
        self._waited = 0.0
        self._images = 0
        self._compiled = False
        self.measures = False
        """Whether a step after the first is done."""

    def batch_is_there(self) -> None:
        self._waited += time.perf_counter() - self._ready

    def step_is_done(self, images: int) -> None:
        if self._compiled and not self.measures:
            self._images, self.measures = 0, True
        elif not self._compiled:
            self._first_ended, self._first_waited = time.perf_counter(), self._waited
        self._compiled = True
        self._images += images

    def waits(self) -> None:
        self._ready = time.perf_counter()

    @property
    def images_per_second(self) -> float:
        since = self._first_ended if self.measures else self._started
        return self._images / max(time.perf_counter() - since, 1e-9)

    @property
    def wait_fraction(self) -> float:
        if not self.measures:
            return self._waited / max(time.perf_counter() - self._started, 1e-9)
        return (self._waited - self._first_waited) / max(time.perf_counter() - self._first_ended, 1e-9)


def average_statistics(model: keras.Model, collective: HorovodCollective) -> None:
    """Set the moving batch-norm statistics, which each rank keeps of its own batches, to their mean over the ranks."""
    statistics = [variable for variable in model.non_trainable_variables if "float" in str(variable.dtype)]
    if collective.size == 1 or not statistics:
        return
    sums = collective.allreduce([tf.convert_to_tensor(variable.value) for variable in statistics])
    for variable, total in zip(statistics, sums, strict=True):
        variable.assign(total / collective.size)


def _finite(loss: float, rank: int, step: int) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} on rank {rank} at step {step}: {_REMEDY}")
    return loss
