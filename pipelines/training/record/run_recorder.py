"""The metrics, plots and models that rank 0 writes to the tracked run during training."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from models.compression.exchange.figures import ExchangeFigures
from models.schedules import Schedule
from pipelines.storage.folder import Location, StorageError
from pipelines.tracking.journal.pictures import Draw
from pipelines.tracking.journal.system import Sample, curves_of
from pipelines.tracking.journal.writer import Point, RunWriter, now
from pipelines.tracking.metrics import VALIDATION_GROUP, headlines
from pipelines.tracking.store.store import TrackedRun, TrackingError
from pipelines.training.checkpoint.in_memory import InMemoryRows, StepRow
from pipelines.training.driver.output import RankJournal
from pipelines.training.ranks.events import SavingModel, TrackingNews, tell
from pipelines.training.ranks.predictions import Predictions
from pipelines.training.ranks.results import Evaluation
from pipelines.training.record.phases import PhaseTable, StepPhases
from pipelines.training.record.plots import (
    MOST_CLASSES,
    Pixels,
    confusion_picture,
    contact_sheet,
    learning_curves,
    learning_rate_curve,
    per_class_bars,
    precision_recall_curves,
    where_the_step_goes,
)
from pipelines.training.tracing.spans import TRACE_FILE

_STEP_METRICS = [
    f"time/{name}" if name.endswith("_seconds") else f"exchange/{name}" for name in ExchangeFigures._fields
]
"""Names in MLflow of the figures that the exchange measures in each step."""


class RunRecorder:
    """The curves of a run by step and by epoch, its plots and its model."""

    def __init__(
        self,
        run: TrackedRun,
        checkpoints: Location,
        schedule: Schedule,
        *,
        start_step: int,
        own_metrics: Sequence[str] = (),
        image_of: Callable[[int], Pixels] | None = None,
        rows: InMemoryRows | None = None,
    ) -> None:
        """Start the writer, which works in parallel with training.

        Args:
            run: The run.
            checkpoints: Folder or URL of the run's checkpoints. Entries wait in a journal beside it until MLflow has
                received them.
            schedule: Learning rate by optimizer step.
            start_step: Number of steps in the checkpoint from which training continues; 0 for a new run.
            own_metrics: Names of the user's own metrics.
            image_of: Returns the pixels of a row of the validation split; called from a thread.
            rows: The unwritten steps in memory that outlives this process. Rows of an earlier process are read from it.
        """
        self._journal = RankJournal(checkpoints)
        self._writer = RunWriter(
            run,
            self._journal.folder,
            restart_step=start_step,
            on_news=lambda news, reason: tell(TrackingNews(news=news, reason=reason)),
            own_metrics=own_metrics,
        )
        self._writer.start()
        self._schedule = schedule
        self._image_of = image_of
        self._phases = PhaseTable(checkpoints, start_step)
        self._rows = rows
        self._steps: list[StepRow] = [] if rows is None else rows.read()
        """The steps that are not written yet."""
        self._next_compiles = True
        """Whether the next step compiles first, as the first step of a process does. Its times are left out."""
        self._written = self._epochs_written = 0
        """Number of steps, and steps at the end of the last epoch, that are fully written.

        After an in-place recovery some steps are recomputed with the same result.
        """

    def write_step(self, step: int, loss: float, measured: ExchangeFigures) -> None:
        """Store one step until `write_steps`; the times of a step that compiles are left out.

        Args:
            step: Number of optimizer steps before this one.
            loss: Loss of the step on this rank.
            measured: Figures of the exchange.
        """
        if self._next_compiles:
            measured, self._next_compiles = measured.without_seconds(), False
        row = StepRow(step, loss, now(), measured)
        if self._rows is not None:  # written steps too: a process that takes over does not know which are written
            self._rows.append(row)
        if step >= self._written:
            self._steps.append(row)

    def expect_compiling(self) -> None:
        """Leave out the times of the next step too, which compiles for images of another size."""
        self._next_compiles = True

    def go_on_after(self, step: int, replaced: Sequence[int]) -> None:
        """Drop later steps, which are trained again, and record the replaced ranks.

        Args:
            step: Number of optimizer steps after which training continues in place.
            replaced: Ranks whose processes were replaced by their spares.
        """
        self._writer.tags({f"recovered_after_step_{step}": " and ".join(f"rank {rank}" for rank in replaced)})
        self._steps = [row for row in self._steps if row.step < step]
        if self._rows is not None:
            self._rows.trim(0, step)

    def write_steps(self, step: int) -> None:
        """Write the stored steps, before the checkpoint that contains `step` optimizer steps is written."""
        self._write_steps(step)
        self._writer.sync()
        self._journal.publish()

    def _write_steps(self, after_step: int) -> None:
        taken, self._steps = self._steps, []
        curves: dict[str, list[Point]] = {}
        for step, loss, milliseconds, measured in taken:
            values = {"train/step_loss": loss, "train/learning_rate": self._schedule(step)}
            values |= zip(_STEP_METRICS, measured, strict=True)
            for name, value in values.items():
                if math.isfinite(value):
                    curves.setdefault(name, []).append(Point(step, value, milliseconds))
        self._writer.curves(curves, after_step=after_step)
        self._written = max(self._written, after_step)

    def write_last_steps(self, samples: list[Sample]) -> None:
        """Write the steps that led to a failure. No checkpoint will contain them, and the driver delivers them.

        Args:
            samples: Samples of rank 0's machine since the last epoch. Those of other ranks can no longer be gathered.
        """
        self._writer.curves(curves_of([samples]))
        self.write_steps(0)
        self._writer.pictures.finish()
        self._writer.checkpointed(sys.maxsize)
        self._journal.publish()

    def write_unsaved_steps(self) -> None:
        """Write the steps since the latest checkpoint after another rank has ended for an unknown reason.

        The driver knows the reason. It delivers these steps if that rank diverged. Otherwise the steps are dropped when
        they are trained again.
        """
        if not self._steps:
            return
        self._write_steps(self._steps[-1].step + 1)
        with suppress(OSError, StorageError):  # the other rank's end is the error
            self._writer.sync()
            self._journal.publish()

    def write_epoch(
        self,
        history: Sequence[dict[str, float]],
        evaluations: Mapping[str, Evaluation],
        phases: StepPhases | None,
        *,
        step: int,
        samples: list[list[Sample]] | None = None,
    ) -> None:
        """Write everything about the last epoch, before its checkpoint is written.

        Args:
            history: Metrics of each epoch so far.
            evaluations: Results of `Validate` after the epoch.
            phases: Times of the parts of its steps; None if the epoch was resumed after its last step.
            step: Number of optimizer steps at the end of the epoch.
            samples: Samples of every rank's machine, in rank order.
        """
        if step <= self._epochs_written:
            return
        self._epochs_written = step
        self._write_steps(step)
        self._writer.metrics(self._with_headlines(history[-1], step), step=step, after_step=step)
        self._writer.curves(curves_of(samples or []), after_step=step)
        if phases is not None:
            rows_of_phases = self._phases.add(phases, epoch=len(history), step=step)
            self._writer.table(rows_of_phases, "where_the_step_goes.json", after_step=step)
        self._draw(history, evaluations, phases, step)
        self._writer.sync()
        self._journal.publish()

    def write_absent(self, history: Sequence[dict[str, float]], *, steps: int) -> None:
        """Write the epochs of a checkpoint that MLflow lacks because their journal was lost with its disk.

        Their points get the current time. Curves by step and samples of machines are lost.

        Args:
            history: Metrics of each epoch.
            steps: Number of optimizer steps per epoch.
        """
        by_step = {
            epoch * steps: self._with_headlines(metrics, epoch * steps) for epoch, metrics in enumerate(history, 1)
        }
        self._writer.absent_metrics(by_step, "train/loss", after_step=len(history) * steps)

    def _with_headlines(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        return {**metrics, **headlines({**metrics, "train/learning_rate": self._schedule(step - 1)})}

    def draw_again(
        self, history: Sequence[dict[str, float]], evaluations: Mapping[str, Evaluation], *, step: int
    ) -> None:
        """Draw the pictures of the last epoch, because its process may have ended before it drew them.

        Args:
            history: Metrics of each epoch.
            evaluations: Results of `Validate` for the last epoch.
            step: Number of optimizer steps at its end.
        """
        self._draw(history, evaluations, self._phases.latest, step)

    def _draw(
        self,
        history: Sequence[dict[str, float]],
        evaluations: Mapping[str, Evaluation],
        phases: StepPhases | None,
        step: int,
    ) -> None:
        so_far, evaluation = list(history), evaluations.get(VALIDATION_GROUP)
        drawings: dict[str, Draw] = {}
        if phases is not None:
            drawings["where_the_step_goes.png"] = lambda: where_the_step_goes(so_far, phases)
        drawings["learning_curves.png"] = lambda: learning_curves(so_far)
        if evaluation is not None:
            rows = evaluation.per_class
            self._writer.table(rows, "per_class_validation.json", after_step=step)
            drawings["per_class_validation.png"] = lambda: per_class_bars(rows, "validation")
            if evaluation.predictions is not None:
                drawings |= _drawings_of(evaluation.predictions, rows, self._image_of)
        for path, draw in drawings.items():
            self._writer.pictures.order(path, draw, after_step=step)

    def write_ranks(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Write the facts about every rank's machine, in rank order."""
        self._writer.text(json.dumps(list(facts), indent=1), "environment/ranks.json")

    def write_trace(self, trace: str, profiles: Path | None, step: int) -> None:
        """Write the trace of some steps, and the profiles that TensorFlow recorded of them.

        Args:
            trace: JSON in Chrome's format.
            profiles: Folder of the profiles; None: there are none.
            step: Number of optimizer steps at the end of the trace.
        """
        self._writer.text(trace, TRACE_FILE, after_step=step)
        if profiles is not None:
            self._writer.folder(profiles, profiles.name)

    def release(self, step: int) -> None:
        """Let the entries of the first `step` optimizer steps be sent to MLflow, because a checkpoint contains them."""
        self._writer.checkpointed(step)
        self._journal.publish()
        if self._rows is not None:
            self._rows.trim(step)

    def write_end(
        self,
        tags: Mapping[str, str],
        summary: Mapping[str, float],
        *,
        steps: int,
        log_model: Callable[[], str] = lambda: "",
    ) -> tuple[str, str]:
        """Write tags and summary at the end, then the model, and stop writing.

        The last pictures are drawn while the model is logged, because both take seconds. Only measured values must be
        delivered before the model.

        Args:
            tags: Tags of the run about its end.
            summary: Metrics of the whole run.
            steps: Total number of optimizer steps.
            log_model: Logs the model and returns its URI; not called if the store cannot be reached.

        Returns:
            The URI of the model, empty if there is none; and why MLflow did not receive everything, otherwise empty.
        """
        tell(SavingModel())
        self._write_summary(tags, summary, steps)
        self._writer.pictures.hurry()
        uri, reason = "", self._writer.drain()
        if not reason:
            try:
                with self._writer.upload_waits():
                    uri = log_model()
            except TrackingError as error:
                reason = str(error)
        self._writer.pictures.finish()
        reason = reason or self._writer.drain()
        self._writer.close()
        self._journal.publish()
        return uri, reason

    def _write_summary(self, tags: Mapping[str, str], summary: Mapping[str, float], steps: int) -> None:
        rates = [self._schedule(step) for step in range(steps)]
        if tags:
            self._writer.tags(tags)
        # A run whose model was not logged is finished a second time, and already has its summary.
        self._writer.absent_metrics({steps: summary}, "summary/parameters")
        self._writer.text(json.dumps(dict(summary), indent=1), "summary.json")
        self._writer.pictures.order("learning_rate.png", lambda: learning_rate_curve(rates), after_step=0)


def _drawings_of(
    predictions: Predictions, rows: Sequence[Mapping[str, Any]], image_of: Callable[[int], Pixels] | None
) -> dict[str, Draw]:
    """Return the functions that draw the predictions for the validation split, by the name of the picture."""
    names = [row["class"] for row in rows]
    drawings: dict[str, Draw] = {
        "precision_recall_validation.png": lambda: precision_recall_curves(predictions, rows, "validation")
    }
    if len(names) <= MOST_CLASSES:
        drawings["confusion_validation.png"] = lambda: confusion_picture(predictions, names, "validation")
    if image_of is not None:
        drawings["predictions_validation.png"] = lambda: contact_sheet(predictions, names, image_of, "validation")
    return drawings
