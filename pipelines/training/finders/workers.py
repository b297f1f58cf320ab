"""The finders' work on every rank: the search for the largest batch, and the learning-rate range test."""

import itertools
import math
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from conf.schema import RunConfig
from conf.sections.training import TrainingConfig
from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE, MEANS_NOT_FINITE
from models.layers.augmentation import AugmentedModel
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.launch.rank.report import StoppedOnRequest, step_done, stop_requested
from pipelines.training.checkpoint.scattered import Scattered, whole_variables
from pipelines.training.finders.batches import BatchSearch, Trial, batch_multiple, next_batch_size
from pipelines.training.finders.rates import RangeTest, SmoothedLosses
from pipelines.training.memory.memory import MemoryLimit, memory_limit, resident_peak
from pipelines.training.memory.shortage import estimate, shortage_explained
from pipelines.training.ranks.collective import HorovodCollective, ranks_on_host
from pipelines.training.ranks.events import BatchTried, Compiling, RateTried, tell
from pipelines.training.setup.input import TrainingInput, make_input
from pipelines.training.setup.rank_setup import (
    RankSetup,
    agree_on_kernels,
    join_ranks,
    make_inputs,
    make_mode_of,
    make_rank_setup,
    make_trainer,
)
from pipelines.training.setup.recipe import freeze_layers, make_loss, make_model
from pipelines.training.step.loop import Trainer
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.step_inputs import Inputs
from pipelines.training.step.weight_average import WeightAverage


def batch_search_worker(config: RunConfig, largest_allowed: int) -> BatchSearch:
    """Try increasing batch sizes on all ranks together; every rank makes the same call and gets the same result.

    Every trial is two complete training steps, with the exchange and the optimizer's update at rate 0. Batch norm
    computes its statistics on each rank separately.

    Args:
        config: The whole configuration; its batch size is not used.
        largest_allowed: No larger batch is tried.
    """
    collective = join_ranks()
    keras.utils.set_random_seed(config.training.seed)
    manifest = read_manifest(config.dataset.path)
    model = make_model(config, manifest)
    freeze_layers(config.warm_start, model)
    agree_on_kernels(config.exchange.codec.name, collective)
    # On a GPU a rank gets an error if memory is full. All ranks share it before the exchange, so no rank waits forever.
    accumulates = config.training.accumulation_steps > 1 or config.training.global_batch_size is not None or _on_gpu()
    setup = RankSetup(collective, manifest, 2 if accumulates else 1, model, make_loss(config.training, manifest))
    mode = make_mode_of(
        config,
        setup,
        steps_per_epoch=1,  # the ranks come together in every step
        loss_scale=LossScale() if config.training.precision == "float16" else None,
        average=WeightAverage(model, config.training.ema) if config.training.ema is not None else None,
    )
    mode.begin(0)
    needs = estimate(model, mode, manifest, accumulates=accumulates)
    trainer = make_trainer(config.training, setup, mode, lambda step: 0.0)
    mode.optimizer.learning_rate = 0.0
    limit = _least(collective, memory_limit(ranks_on_host()))
    trials: list[Trial] = []
    while size := next_batch_size(needs, limit, largest_allowed, trials, batch_multiple(config.training)):
        if collective.rank == 0:
            tell(BatchTried(batch_size=size))
        trials.append(_try(size, trainer, manifest, augments=isinstance(model, AugmentedModel)))
    return BatchSearch(needs, limit, largest_allowed, trials)


def _try(size: int, trainer: Trainer, manifest: Manifest, *, augments: bool) -> Trial:
    collective = trainer.collective
    images = {group.name: tf.zeros((size, *group.shape), group.dtype) for group in manifest.groups}
    targets = tf.zeros((size, len(manifest.class_names)))
    batch = (images, targets, tf.zeros(size, tf.int32) if augments else None)
    if trainer.accumulate is not None:
        failed = 0
        try:
            trainer.accumulate(*batch)
        except tf.errors.ResourceExhaustedError:
            failed = 1
        if collective.sum(np.array([failed]))[0] > 0:
            return Trial(size, _peak(collective), out_of_memory=True)
        trainer.step(*batch)
    else:
        for _ in range(2):  # the first step compiles; the second one runs with the remaining memory
            trainer.step(*batch)
    return Trial(size, _peak(collective))


def _peak(collective: HorovodCollective) -> int:
    """Return the largest memory of any rank so far: resident memory, or GPU memory taken by TensorFlow."""
    own = tf.config.experimental.get_memory_info("GPU:0")["peak"] if _on_gpu() else resident_peak()
    return int(collective.concatenate(np.array([own], np.int64)).max())


def _least(collective: HorovodCollective, own: MemoryLimit) -> MemoryLimit:
    """Return the limit of the rank with the least memory, which may be on another host."""
    limits = collective.concatenate(np.array([own.bytes], np.int64))
    least = int(np.argmin(limits))
    if int(limits[least]) == own.bytes:
        return own
    return MemoryLimit(int(limits[least]), f"rank {least}'s memory, {int(limits[least]) / 2**20:,.0f} MiB")


def _on_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


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
        # A scale of 1 that never grows changes no gradient. It lets all ranks stop together if one has gradients that
        # are not finite.
        scale = LossScale() if training.precision == "float16" else LossScale(initial=1.0, growth_steps=2**31 - 1)
        mode = make_mode_of(config, setup, steps_per_epoch=len(rates), loss_scale=scale)
        trainer = make_trainer(training, setup, mode, lambda step: rates[step])
        shortage.know(setup, mode)
        equal = [each for each in whole_variables(mode.optimizer) if not isinstance(each, Scattered)]
        collective.broadcast([variable.value for variable in [*model.variables, *equal]])
        if collective.rank == 0:
            tell(Compiling())
        data = make_input(
            config, setup.manifest, rank=collective.rank, size=collective.size, micro_batches=setup.micro_batches
        )
        return _run(_inputs(training, data, model), trainer, rates)


def _run(inputs: Iterator[Inputs], trainer: Trainer, rates: Sequence[float]) -> RangeTest:
    losses, collective = SmoothedLosses(), trainer.collective
    for step, rate in enumerate(rates):
        # From sums over the ranks, all of them come to the same decisions.
        total, stops = collective.sum(np.array([_step(trainer, rate, inputs), float(stop_requested())], np.float64))
        if stops > 0:
            raise StoppedOnRequest("the range test was stopped; nothing was recorded")
        if losses.add(rate, float(total) / collective.size):
            return RangeTest(losses.points, diverged=True)
        if collective.rank == 0:
            tell(RateTried(step=step + 1, steps=len(rates), rate=rate, smoothed_loss=losses.points[-1].smoothed))
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
