"""The learning-rate range test on every rank, with the real global batch and the real optimizer."""

import itertools
import math
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from conf.schema import RunConfig
from conf.sections.training import TrainingConfig
from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE, MEANS_NOT_FINITE
from pipelines.launch.rank.report import StoppedOnRequest, step_done, stop_requested
from pipelines.training.checkpoint.scattered import equal_on_ranks
from pipelines.training.finders.rates import RangeTest, SmoothedLosses
from pipelines.training.memory.shortage import shortage_explained
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.events import Compiling, RateTried, tell
from pipelines.training.setup.input import TrainingInput, make_input
from pipelines.training.setup.rank_setup import make_inputs, make_rank_setup
from pipelines.training.setup.trainer import make_mode_of, make_trainer
from pipelines.training.step.loop import Trainer
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.step_inputs import Inputs

_NEVER = 2**31 - 1


def range_test_worker(config: RunConfig, rates: Sequence[float]) -> RangeTest:
    """Take one optimizer step at each rate until the loss diverges; all ranks make the same call with the same result.

    Model, optimizer, codec, batch and order of samples are those of a training with this configuration. The test writes
    nothing.

    Args:
        config: The whole configuration; its schedule is not used.
        rates: Learning rate of each step.

    Raises:
        StoppedOnRequest: A rank was asked to stop.
        MemoryError: This rank ran out of memory. The error names what would fit.
    """
    training = config.training
    with shortage_explained(training) as shortage:
        setup = make_rank_setup(config)
        collective, model = setup.collective, setup.model
        # A scale of 1 changes no gradient. It lets all ranks stop together if one has gradients that are not finite.
        scale = LossScale() if training.precision == "float16" else LossScale(initial=1.0, growth_steps=_NEVER)
        mode = make_mode_of(config, setup, steps_per_epoch=len(rates), loss_scale=scale)
        trainer = make_trainer(training, setup, mode, lambda step: rates[step])
        shortage.know(setup, mode)
        collective.broadcast([variable.value for variable in [*model.variables, *equal_on_ranks(mode.optimizer)]])
        if collective.rank == 0:
            tell(Compiling())
        data = make_input(
            config, setup.manifest, rank=collective.rank, size=collective.size, micro_batches=setup.micro_batches
        )
        return _run(_inputs(training, data, model), trainer, rates)


def _run(inputs: Iterator[Inputs], trainer: Trainer, rates: Sequence[float]) -> RangeTest:
    losses = SmoothedLosses()
    for step, rate in enumerate(rates):
        loss = _step(trainer, rate, inputs)
        if _add(losses, rate, loss, trainer.collective):
            return RangeTest(losses.points, diverged=True)
        if trainer.collective.rank == 0:
            smoothed = losses.points[-1].smoothed
            tell(RateTried(step=step + 1, steps=len(rates), rate=rate, smoothed_loss=smoothed))
        else:
            step_done()
    return RangeTest(losses.points, diverged=False)


def _inputs(training: TrainingConfig, data: TrainingInput, model: keras.Model) -> Iterator[Inputs]:
    """Yield the inputs of this rank's batches, epoch after epoch."""
    for epoch in itertools.count():
        yield from map(make_inputs(training, model, epoch), data.batches_of(epoch, 0))


def _step(trainer: Trainer, rate: float, inputs: Iterator[Inputs]) -> float:
    """Take one optimizer step and return its loss on this rank, or NaN on all ranks if the step failed."""
    trainer.optimizer.learning_rate = rate
    for _ in range(trainer.micro_batches - 1):
        assert trainer.accumulate is not None
        trainer.accumulate(*next(inputs))
    try:
        return float(trainer.step(*next(inputs)))
    except tf.errors.InvalidArgumentError as error:
        if GRADIENTS_NOT_FINITE not in error.message and MEANS_NOT_FINITE not in error.message:
            raise
        # All ranks know this from a sum, so no rank waits for another one.
        return math.nan


def _add(losses: SmoothedLosses, rate: float, loss: float, collective: HorovodCollective) -> bool:
    """Add the mean loss over the ranks and return whether it diverged; the result is the same on all ranks."""
    total, stops = collective.sum(np.array([loss, float(stop_requested())], np.float64))
    if stops > 0:
        raise StoppedOnRequest("the range test was stopped; nothing was recorded")
    return losses.add(rate, float(total) / collective.size)
