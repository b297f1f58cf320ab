"""The objects that one rank trains with, from model and data to checkpoints."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import keras

from conf.schema import RunConfig
from conf.sections.training import TrainingConfig
from models.layers.grids import Size
from pipelines.dataset.format.order import steps_per_epoch
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.folder import Location
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.checkpoint.checkpoints import Checkpoints
from pipelines.training.checkpoint.in_memory import Recovery, make_recovery
from pipelines.training.checkpoint.scattered import whole_variables
from pipelines.training.checkpoint.selection import best_step
from pipelines.training.checkpoint.settings import recorded_settings
from pipelines.training.checkpoint.state import TrainingState
from pipelines.training.memory.shortage import Shortage
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.setup.input import TrainingInput, make_input
from pipelines.training.setup.precision import tell_precision
from pipelines.training.setup.rank_setup import RankSetup, make_mode_of, make_rank_setup, make_trainer, use_kernels
from pipelines.training.setup.rates import make_schedule
from pipelines.training.setup.resolution import trained_sizes
from pipelines.training.setup.warm_start import dataset_names
from pipelines.training.step.loop import Trainer
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.mode import Mode
from pipelines.training.step.step import StepClocks
from pipelines.training.step.weight_average import WeightAverage
from pipelines.training.validation import Validate, make_validation

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochPlan:
    """The steps of the epochs, and the size of their images."""

    steps: int
    """Number of steps per epoch."""
    global_batch_size: int
    """Samples per optimizer step over all ranks."""
    sizes: Sequence[Size | None]
    """Size of the images in each epoch; None: the size in the dataset."""


@dataclass(frozen=True)
class RankTraining:
    """The objects that one rank trains with; every rank makes them in the same order."""

    training: TrainingConfig
    setup: RankSetup
    data: TrainingInput
    plan: EpochPlan
    stop: StopAgreement
    clocks: StepClocks
    loss_scale: LossScale | None
    average: WeightAverage | None
    mode: Mode
    trainer: Trainer
    validate: Validate
    checkpoints: Checkpoints
    recovery: Recovery | None


def make_rank_training(
    config: RunConfig, run: TrackedRun, checkpoint_folder: Location, shortage: Shortage
) -> RankTraining:
    """Join the ranks and make the objects that this rank trains with; every rank makes the same call.

    Args:
        config: The whole configuration.
        run: The MLflow run.
        checkpoint_folder: Folder or URL of this run's checkpoints.
        shortage: Receives the memory needs of the model, for the error text if memory runs out.
    """
    training, setup = config.training, make_rank_setup(config, checkpoint_folder)
    manifest, collective = setup.manifest, setup.collective
    data = make_input(config, manifest, rank=collective.rank, size=collective.size, micro_batches=setup.micro_batches)
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    _log.info(
        "rank %d of %d: %d training samples, %d steps per epoch%s",
        collective.rank,
        collective.size,
        manifest.splits[TRAINING_SPLIT].rows,
        steps,
        f" of {setup.micro_batches} micro-batches" if setup.micro_batches > 1 else "",
    )
    tell_precision(training.precision, collective)

    stop, clocks = StopAgreement(collective), StepClocks()
    loss_scale = LossScale() if training.precision == "float16" else None
    average = WeightAverage(setup.model, training.ema) if training.ema is not None else None
    mode = make_mode_of(
        config, setup, steps_per_epoch=steps, stop=stop, loss_scale=loss_scale, average=average, clocks=clocks
    )
    trainer = make_trainer(training, setup, mode, make_schedule(config, steps), stop)
    shortage.know(setup, mode)
    validate = make_validation(config, manifest, setup.model, collective, average)

    further = [variable for part in (loss_scale, average) if part is not None for variable in part.variables]
    checkpoints = _make_checkpoints(config, setup, run, checkpoint_folder, data.order, steps, mode, further)
    recovery = make_recovery(
        collective,
        [*checkpoints.variables, *checkpoints.own, *mode.exchange.variables],
        mode,
        config.launch.recover_every_steps,
        trainer.reset,
        uses_kernels=use_kernels(config.exchange.codec.name),
    )
    return RankTraining(
        training=training,
        setup=setup,
        data=data,
        plan=EpochPlan(steps, config.global_batch_size, trained_sizes(config, manifest, steps)),
        stop=stop,
        clocks=clocks,
        loss_scale=loss_scale,
        average=average,
        mode=mode,
        trainer=trainer,
        validate=validate,
        checkpoints=checkpoints,
        recovery=recovery,
    )


def _make_checkpoints(
    config: RunConfig,
    setup: RankSetup,
    run: TrackedRun,
    folder: Location,
    order: str,
    steps: int,
    mode: Mode,
    further: Sequence[keras.Variable],
) -> Checkpoints:
    """Make the checkpoints of this run; `further` are variables that do not belong to model, optimizer or mode.

    `steps` is the number of steps per epoch.
    """
    manifest, selection = setup.manifest, config.training.selection
    initial = TrainingState(
        epochs_done=0,
        step=0,
        seed=config.training.seed,
        global_batch_size=config.global_batch_size,
        run_id=run.run_id,
        dataset_fingerprint=manifest.fingerprint,
        history=[],
        order=order,
        settings={**recorded_settings(config), **dataset_names(manifest, config.input.bands)},
    )
    best = functools.partial(best_step, config=selection, steps_per_epoch=steps) if selection.metric else None
    own = {id(variable) for variable in mode.own}
    trained = [variable for variable in whole_variables(mode.optimizer) if id(variable) not in own]
    variables = [*setup.model.variables, *trained, *further, *mode.shared]
    return Checkpoints(folder, initial, variables, mode.exchange, setup.collective, best, own=mode.own)
