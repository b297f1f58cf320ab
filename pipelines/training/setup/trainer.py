"""The training mode of a rank, and the trainer that turns its batches into updates."""

from conf.schema import RunConfig
from conf.sections.training import TrainingConfig
from models.compression.arithmetic.graph import Marks
from models.schedules import Schedule
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.setup.rank_setup import RankSetup
from pipelines.training.setup.recipe import make_mode
from pipelines.training.step.loop import Trainer
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.mode import Mode
from pipelines.training.step.step import StepClocks
from pipelines.training.step.weight_average import WeightAverage


def make_mode_of(
    config: RunConfig,
    setup: RankSetup,
    *,
    steps_per_epoch: int,
    stop: StopAgreement | None = None,
    loss_scale: LossScale | None = None,
    average: WeightAverage | None = None,
    clocks: StepClocks | None = None,
) -> Mode:
    """Make the configured mode for the setup of a rank; for the arguments see `make_mode`."""
    return make_mode(
        config,
        setup.model,
        setup.loss,
        setup.collective,
        steps_per_epoch=steps_per_epoch,
        micro_batches=setup.micro_batches,
        marks=Marks() if config.training.trace_steps is not None else None,
        stop=stop,
        loss_scale=loss_scale,
        average=average,
        clocks=clocks,
    )


def make_trainer(
    training: TrainingConfig, setup: RankSetup, mode: Mode, schedule: Schedule, stop: StopAgreement | None = None
) -> Trainer:
    """Make the trainer that turns the batches of this rank into updates.

    Args:
        training: The settings of the training.
        setup: The setup of this rank.
        mode: The mode that takes the steps.
        schedule: Learning rate by optimizer step.
        stop: The agreement on when to stop, which `mode` includes; None: training cannot be asked to stop.
    """

    def reset() -> None:
        mode.reset()
        if stop is not None:
            stop.forget()

    return Trainer(
        step=mode.step,
        optimizer=mode.optimizer,
        schedule=schedule,
        collective=setup.collective,
        stop=stop,
        accumulate=mode.accumulate,
        micro_batches=setup.micro_batches,
        reset=reset,
        block=mode.block,
        ranks_per_copy=training.mode.declaration.ranks_per_copy,
    )
