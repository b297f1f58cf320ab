"""One epoch of training on one rank, and what makes the ranks' models one again."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

    Raises:
        FloatingPointError: The loss or a gradient is not finite; names rank and step.
    """
    losses: list[float] = []
    images = 0
    pending: tf.Tensor | None = None
    started = measured_from = reported = time.perf_counter()
    measured_images = 0

    def settle() -> None:
        if pending is not None:
            losses.append(_finite(float(pending), collective.rank, first_step + len(losses)))

    waited = 0.0
    ready = started
    number = -1
    for batch in batches:  # not enumerate: it would keep each batch for one step longer
        number += 1
        waited += time.perf_counter() - ready
        optimizer.learning_rate = schedule(first_step + number)
        seeds = None if seeds_of is None else tf.convert_to_tensor(seeds_of(batch.rows))
        try:
            result = step(image_tensors(batch.images), tf.convert_to_tensor(batch.targets, tf.float32), seeds)
        except tf.errors.InvalidArgumentError as error:
            settle()  # where the loss before was not finite already, it is the one to name
            if _NOT_FINITE not in error.message:
                raise
            raise FloatingPointError(
                f"gradients are not finite on rank {collective.rank} at step {first_step + number}: {_REMEDY}"
            ) from error
        # The loss of the step before: waiting for this one's would keep an accelerator idle.
        settle()
        pending = result
        images += len(batch.weights)
        done = first_step + number + 1
        if checkpoint_every is not None and done % checkpoint_every == 0:
            settle()  # a checkpoint holds no step whose loss has not been seen to be finite
            pending = None
            checkpoint(done, earlier[0] + math.fsum(losses), earlier[1] + len(losses))
        now = time.perf_counter()
        if number == 0:
            float(result)
            measured_from, waited = time.perf_counter(), 0.0
        else:
            measured_images += len(batch.weights)
        if measured_images and now - reported >= _SECONDS_BETWEEN_REPORTS:
            reported = now
            rate = collective.size * measured_images / max(now - measured_from, 1e-9)
            report(Progress(number + 1, losses[-1], rate))
        del batch  # its memory is free for the reader when the step has used it
        ready = time.perf_counter()
    settle()
    ended = time.perf_counter()
    rate = measured_images / (ended - measured_from) if measured_images else images / (ended - started)
    total, count = collective.sum(np.array([earlier[0] + math.fsum(losses), earlier[1] + len(losses)], np.float64))
    wait_fraction = waited / max(ended - measured_from, 1e-9)
    return EpochResult(float(total / count), collective.size * rate, wait_fraction)


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
