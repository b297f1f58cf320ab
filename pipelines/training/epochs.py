"""Which epoch is trained, and the checkpoints within it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import keras

from pipelines.launch.report import report, step_done
from pipelines.training.checkpoint import TrainingState
from pipelines.training.collective import HorovodCollective
from pipelines.training.loop import LossTotal, Progress, average_statistics
from pipelines.training.record import Record
from pipelines.training.recovery import Recovery
from pipelines.training.resume import Checkpoints
from pipelines.training.weight_average import WeightAverage


@dataclass(frozen=True)
class Place:
    """Which epoch is trained, and what was done of it before this attempt."""

    epoch: int
    """Index of the epoch, from 0."""
    epochs: int
    steps: int
    """Steps of one epoch."""
    resumed_from: TrainingState

    @property
    def start_step(self) -> int:
        """Steps of this epoch that the checkpoint already has."""
        return self.resumed_from.step - self.epoch * self.steps if self.is_first else 0

    @property
    def earlier(self) -> LossTotal:
        """Losses of those steps."""
        return LossTotal(self.resumed_from.loss_sum, self.resumed_from.loss_count) if self.is_first else LossTotal()

    @property
    def fields(self) -> dict[str, int]:
        """What a report to the driver says of it."""
        return {"epoch": self.epoch + 1, "epochs": self.epochs, "steps": self.steps}

    @property
    def is_first(self) -> bool:
        """Whether it is the first one that this process trains."""
        return self.epoch == self.resumed_from.epochs_done


@dataclass(frozen=True)
class EpochKeeper:
    """Keeps the state within an epoch in memory, and after its last step; see `StepSaver`."""

    recovery: Recovery
    initial: TrainingState
    history: list[dict[str, float]]
    place: Place

    def is_due(self, step: int) -> bool:
        """Whether a state is kept after so many optimizer steps; the same on every rank."""
        return step % self.recovery.every_steps == 0 or step % self.place.steps == 0

    def save(self, step: int, losses: LossTotal) -> None:
        """Keep the state of an unfinished epoch."""
        state = replace(
            self.initial,
            epochs_done=self.place.epoch,
            step=step,
            history=self.history,
            loss_sum=losses.sum,
            loss_count=losses.count,
        )
        self.recovery.keep(state)

    def close_epoch(self) -> None:
        """Keep the state after the epoch."""
        epochs = self.place.epoch + 1
        state = replace(self.initial, epochs_done=epochs, step=epochs * self.place.steps, history=self.history)
        self.recovery.keep(state)


@dataclass(frozen=True)
class EpochSaver:
    """Writes checkpoints within an epoch; the one at its end is written when it has been evaluated."""

    checkpoints: Checkpoints
    model: keras.Model
    average: WeightAverage | None
    record: Record | None
    history: list[dict[str, float]]
    place: Place
    every_steps: int | None

    def is_due(self, step: int) -> bool:
        """Whether the setting asks for a checkpoint after so many optimizer steps."""
        return self.every_steps is not None and step % self.every_steps == 0 and step % self.place.steps != 0

    def save(self, step: int, losses: LossTotal) -> None:
        """Write a checkpoint of an unfinished epoch; every rank makes the same call."""
        # A checkpoint holds one set of moving statistics, so that training is the same if it is resumed from here.
        averages = self.average.statistics if self.average else ()
        average_statistics(self.model, self.checkpoints.collective, averages)
        everyones = losses.over_ranks(self.checkpoints.collective)
        if self.record is not None:
            self.record.write_steps(step)
        self.checkpoints.save(
            epochs_done=self.place.epoch,
            step=step,
            history=self.history,
            loss_sum=everyones.sum,
            loss_count=everyones.count,
        )
        if self.record is not None:
            self.record.hold(step)


def make_progress_report(collective: HorovodCollective, place: Place) -> Callable[[Progress], None]:
    """Return the function that reports rank 0's progress to the driver, and a sign of life from every other rank."""

    def report_progress(progress: Progress) -> None:
        if collective.rank == 0:
            report(event="step", **place.fields, **{**asdict(progress), "step": place.start_step + progress.step})
        else:
            step_done()

    return report_progress
