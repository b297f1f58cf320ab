"""The epochs of a run on one rank, and the checkpoints inside each epoch."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pipelines.launch.rank.report import StoppedOnRequest, step_done
from pipelines.tracking.journal.system import SystemSampler
from pipelines.training.checkpoint.checkpoints import REMEDY
from pipelines.training.checkpoint.in_memory import Recovery
from pipelines.training.checkpoint.selection import is_over
from pipelines.training.checkpoint.state import TrainingState
from pipelines.training.rank_training import RankTraining
from pipelines.training.ranks.collective import gather_json
from pipelines.training.ranks.events import EpochTrained, StepTrained, tell
from pipelines.training.ranks.results import Evaluation
from pipelines.training.record.epoch_metrics import epoch_metrics, totals_after
from pipelines.training.record.observer import StepMeasurements
from pipelines.training.record.phases import divide, line_of
from pipelines.training.record.run_recorder import RunRecorder
from pipelines.training.setup.rank_setup import make_inputs
from pipelines.training.step.loop import EpochResult, LossTotal, Progress, StepHooks, train_epoch
from pipelines.training.tracing.tracer import StepTracer


@dataclass(frozen=True)
class EpochSaver:
    """Writes checkpoints inside an epoch, on disk or in memory; see `StepSaver`."""

    is_due: Callable[[int], bool]
    save: Callable[[int, LossTotal, float], None]


@dataclass(frozen=True)
class Epochs:
    """The epochs of one run on this rank: training, validation, recording, checkpoint."""

    rank: RankTraining
    recorder: RunRecorder | None
    """Records the run; None on all ranks but 0."""
    measurements: StepMeasurements
    sampler: SystemSampler | None
    tracer: StepTracer | None
    before_step: Callable[[RankTraining, int], None] = lambda rank, step: None
    """Called before each optimizer step with this rank and the number of completed steps."""

    def train(self, start: TrainingState) -> list[dict[str, float]]:
        """Train the remaining epochs and return the history, which is complete on rank 0 only."""
        history, earlier, began = list(start.history), start, time.perf_counter()
        steps, selection, collective = self.rank.plan.steps, self.rank.training.selection, self.rank.setup.collective
        for epoch in range(start.epochs_done, self.rank.training.epochs):
            # Only rank 0 has the history of an earlier attempt.
            if selection.patience is not None and collective.broadcast_number(int(is_over(history, selection))):
                break
            if self._may_stop_before(epoch, start) and self.rank.stop.is_requested_now():
                raise StoppedOnRequest(f"stopped after step {max(self._step_of_all(start), epoch * steps)}")
            began = self._train_one(earlier, history, began, is_first=earlier is start)
            earlier = replace(self.rank.checkpoints.initial, epochs_done=epoch + 1, step=(epoch + 1) * steps)
        # A checkpoint inside an epoch has no evaluation. Training stopped there because an earlier epoch was the best.
        if earlier is start and start.step == start.epochs_done * steps:
            evaluations = self._validate(start.step)
            if self.recorder is not None:
                self.recorder.draw_again(history, evaluations, step=start.step)
        if self.tracer is not None:
            self.tracer.finish()
        return history

    def _may_stop_before(self, epoch: int, start: TrainingState) -> bool:
        """Return whether a checkpoint contains all steps before this epoch; the same on every rank.

        In-memory checkpoints inside an epoch do not count. The ranks then take one more step, stop together and write a
        checkpoint.
        """
        return self.rank.recovery is None or self._step_of_all(start) <= epoch * self.rank.plan.steps

    def _step_of_all(self, start: TrainingState) -> int:
        """Return the step at which the ranks last came together; in place, a rank may continue from a later step."""
        return start.step if self.rank.recovery is None else self.rank.mode.block(start.step)

    def _validate(self, step: int) -> Mapping[str, Evaluation]:
        """Validate after `step` optimizer steps; the error names the step if the predictions are not finite."""
        try:
            return self.rank.validate()
        except FloatingPointError as error:
            raise FloatingPointError(f"{error} in validation after step {step}: {REMEDY}") from None

    def _train_one(
        self, earlier: TrainingState, history: list[dict[str, float]], began: float, *, is_first: bool
    ) -> float:
        """Train and validate one epoch; return the time at which the next epoch begins.

        Args:
            earlier: State before the first step: that of the checkpoint, or the end of the previous epoch.
            history: Metrics of each epoch done, to which this adds those of the epoch.
            began: Time from which the epoch is timed.
            is_first: Whether this epoch is the first one that this process trains.
        """
        rank, collective = self.rank, self.rank.setup.collective
        sizes, epoch = rank.plan.sizes, earlier.epochs_done
        number = epoch + 1
        end = number * rank.plan.steps
        changes_size = not is_first and sizes[epoch] != sizes[epoch - 1]
        if changes_size and self.recorder is not None:
            self.recorder.expect_compiling()
        trained = self._train_steps(earlier, history)
        rank.mode.come_together()
        evaluations = self._validate(end)
        payload_bytes = earlier.epoch_payload_bytes + self.measurements.payload_bytes
        phases = divide(collective.concatenate(self.measurements.take(trained)))
        samples = gather_json(self.sampler.take() if self.sampler else [], collective)
        ended = time.perf_counter()
        totals = totals_after(
            history,
            steps=rank.plan.steps,
            global_batch_size=rank.plan.global_batch_size,
            payload_bytes=payload_bytes,
            seconds=earlier.epoch_seconds + ended - began,
            compile_seconds=trained.compile_seconds if is_first or changes_size else 0.0,
        )
        history.append(
            epoch_metrics(
                trained,
                phases,
                evaluations,
                rank.loss_scale,
                totals,
                size=sizes[epoch],
                of_mode=rank.mode.figures(),
            )
        )
        if self.recorder is not None:
            timed = phases if trained.measured_steps else None
            self.recorder.write_epoch(history, evaluations, timed, step=end, samples=samples)
            epochs = rank.training.epochs
            tell(
                EpochTrained(
                    epoch=number,
                    epochs=epochs,
                    metrics=history[-1],
                    where=line_of(timed) if timed else "",
                    is_last=number == epochs or is_over(history, rank.training.selection),
                )
            )
        # Last: an epoch with a checkpoint was recorded and reported to the driver.
        state = replace(rank.checkpoints.initial, epochs_done=number, step=end, history=history)
        rank.checkpoints.save(state, evaluations)
        if self.recorder is not None:
            self.recorder.release(end)
        if rank.recovery is not None:
            rank.recovery.save(state)
        return ended

    def _train_steps(self, earlier: TrainingState, history: list[dict[str, float]]) -> EpochResult:
        """Train the remaining steps of one epoch; for the arguments see `_train_one`."""
        rank, recovery, epoch = self.rank, self.rank.recovery, earlier.epochs_done
        on_disk = EpochSaver(self._is_due, functools.partial(self._save, earlier, history))
        in_memory = (
            EpochSaver(
                functools.partial(self._is_due_in_memory, recovery),
                functools.partial(self._save_in_memory, recovery, earlier, history),
            )
            if recovery is not None
            else None
        )
        batches, trainer = rank.data.batches_of(epoch, earlier.step - epoch * rank.plan.steps), rank.trainer
        if self.tracer is not None:
            batches, trainer = self.tracer.of_batches(batches), self.tracer.of_trainer(trainer)
        return train_epoch(
            batches,
            trainer,
            first_step=earlier.step,
            earlier=LossTotal(earlier.loss_sum, earlier.loss_count),
            inputs_of=make_inputs(rank.training, rank.setup.model, epoch, rank.plan.sizes[epoch]),
            hooks=StepHooks(
                before=functools.partial(self.before_step, rank),
                observer=self.measurements,
                saver=on_disk if rank.data.resumes_within_epoch else None,
                in_memory_saver=in_memory,
                report=functools.partial(self._report, earlier),
            ),
        )

    def _is_due(self, step: int) -> bool:
        """Return whether the setting asks for a checkpoint inside an epoch after `step` optimizer steps."""
        every = self.rank.training.checkpoint_every_steps
        return every is not None and step % every == 0 and step % self.rank.plan.steps != 0

    def _save(
        self, earlier: TrainingState, history: list[dict[str, float]], step: int, losses: LossTotal, seconds: float
    ) -> None:
        """Write a checkpoint of an unfinished epoch; every rank makes the same call."""
        # A checkpoint holds one set of moving statistics. Training continues with it here, as after a resume.
        self.rank.mode.come_together()
        everyones = losses.over_ranks(self.rank.checkpoints.collective)
        if self.recorder is not None:
            self.recorder.write_steps(step)
        self.rank.checkpoints.save(self._unfinished(earlier, history, step, everyones, seconds))
        if self.recorder is not None:
            self.recorder.release(step)

    def _is_due_in_memory(self, recovery: Recovery, step: int) -> bool:
        """Return whether an in-memory checkpoint is due after `step` optimizer steps; the same on every rank."""
        return step % recovery.every_steps == 0 or step % self.rank.plan.steps == 0

    def _save_in_memory(
        self,
        recovery: Recovery,
        earlier: TrainingState,
        history: list[dict[str, float]],
        step: int,
        losses: LossTotal,
        seconds: float,
    ) -> None:
        """Write an in-memory checkpoint inside an epoch or after its last step."""
        recovery.save(self._unfinished(earlier, history, step, losses, seconds))

    def _unfinished(
        self, earlier: TrainingState, history: list[dict[str, float]], step: int, losses: LossTotal, seconds: float
    ) -> TrainingState:
        """Return the state after `step` optimizer steps; `seconds` is the time of the steps since `earlier`."""
        return replace(
            self.rank.checkpoints.initial,
            epochs_done=earlier.epochs_done,
            step=step,
            history=history,
            loss_sum=losses.sum,
            loss_count=losses.count,
            epoch_seconds=earlier.epoch_seconds + seconds,
            epoch_payload_bytes=earlier.epoch_payload_bytes + self.measurements.payload_bytes,
        )

    def _report(self, earlier: TrainingState, progress: Progress) -> None:
        """Report rank 0's progress to the driver; other ranks send a sign of life."""
        epoch, steps = earlier.epochs_done, self.rank.plan.steps
        if self.rank.setup.collective.rank == 0:
            tell(
                StepTrained(
                    epoch=epoch + 1,
                    epochs=self.rank.training.epochs,
                    step=earlier.step - epoch * steps + progress.step,
                    steps=steps,
                    loss=progress.loss,
                    images_per_second=progress.images_per_second,
                )
            )
        else:
            step_done()
