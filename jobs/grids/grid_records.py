"""Reads MLflow's records of the cells of a grid for the results file."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from conf.schema import RunConfig
from jobs.grids.cells import PlannedCell
from jobs.shell.command import say
from pipelines.comparison.grid_results import CellLine, ResultsFile
from pipelines.comparison.run import CURVE_GROUPS, CURVES, compared_run
from pipelines.tracking.store.experiments import experiment_of, name_in_store
from pipelines.tracking.store.recorded import DIVERGED_TAG, RecordedRun, TaggedRun, recorded_training, runs_with_tag
from pipelines.tracking.store.store import TrackingError, tracking_uri

CELL_TAG = "grid_cell"
"""Tag of a cell's run: the digest with which the same command finds the run again."""
_HISTORY_ROWS = 50


def parent_of(results: ResultsFile, experiment: str) -> str | None:
    """Return the newest parent run of these results' cells in an experiment; None: the store has none.

    Raises:
        ValueError: The experiment was renamed, so that its old name does not find the cells' runs.
        TrackingError: The store does not answer.
    """
    for line in reversed(results.parents):
        now = experiment_of(line.parent)
        if now is not None and now == name_in_store(tracking_uri(), experiment):
            return line.parent
        if now is not None and line.experiment == experiment:
            raise ValueError(
                f"the grid of these results was started in experiment {experiment!r}, which is {now!r} now: set "
                f"tracking.experiment={now}"
            )
    return None


def ended_run(found: Sequence[TaggedRun]) -> TaggedRun | None:
    """Return a cell's finished run, else its newest run if that diverged; None: there is neither."""
    finished = next((run for run in found if run.status == "FINISHED"), None)
    return finished or next((run for run in found[:1] if run.tags.get(DIVERGED_TAG)), None)


def line_of(
    planned: PlannedCell,
    status: Literal["finished", "diverged", "failed"],
    run_id: str | None,
    seconds: float,
    metrics: Mapping[str, float] | None = None,
    *,
    error: str = "",
    resumed: bool = False,
) -> CellLine:
    """Make a line of the results file with the training's records in MLflow, and its metrics if none are given.

    Args:
        planned: The cell.
        status: End of the cell's training.
        run_id: The cell's run; None: no run was created.
        seconds: Seconds between start and end of the training.
        metrics: Metrics of the epoch that provides the model's weights; None: MLflow's.
        error: Why the training did not finish.
        resumed: Whether the cell continued an interrupted training.
    """
    run, of_model = None, metrics or {}
    if run_id is not None:
        try:
            recorded = recorded_training(run_id, groups=CURVE_GROUPS, metrics=CURVES)
            run = compared_run(recorded, planned.experiment, history_rows=_HISTORY_ROWS)
            of_model = _metrics_of_model(recorded, planned.config) if metrics is None else metrics
        except (ValueError, TrackingError) as problem:
            say(f"the results have no curves of cell {planned.cell.number}: {problem}; the same command adds them")
    return CellLine(
        cell=planned.digest,
        status=status,
        settings=planned.cell.values,
        error=error,
        seconds=round(seconds, 1),
        resumed=resumed,
        epochs=planned.config.training.epochs,
        metrics={name: value for name, value in of_model.items() if math.isfinite(value)},
        run=run,
    )


def _metrics_of_model(run: RecordedRun, config: RunConfig) -> dict[str, float]:
    """Return the metrics with curves, at the epoch that provides the weights of the run's model."""
    ends = [point.step for point in run.curves.get("train/loss", [])]
    if config.training.selection.model == "best":
        ends = ends[: int(run.tags.get("best_epoch", len(ends)))]
    return {name: point.value for name, curve in run.curves.items() for point in curve if point.step in ends[-1:]}


def add_unread(cells: Sequence[PlannedCell], results: ResultsFile) -> None:
    """Add MLflow's records of trainings whose lines lack them, because MLflow could not be read before.

    Raises:
        ValueError: As `parent_of`.
    """
    lines = results.cells
    for planned in cells:
        line = lines.get(planned.digest)
        if line is None or not line.is_done or line.run is not None:
            continue
        try:
            parent_of(results, planned.experiment)
            done = ended_run(runs_with_tag(planned.experiment, CELL_TAG, planned.digest))
        except TrackingError as problem:
            say(f"the results have no curves of cell {planned.cell.number}: {problem}")
            return
        if done is None:
            say(f"the results have no curves of cell {planned.cell.number}, and MLflow has no run of it")
            continue
        recorded = line_of(planned, line.status, done.run_id, line.seconds)
        if recorded.run is not None:
            metrics = line.metrics or recorded.metrics
            results.append(line.model_copy(update={"run": recorded.run, "metrics": metrics}))
            say(f"the curves of cell {planned.cell.number} are read from MLflow run {done.run_id}")
