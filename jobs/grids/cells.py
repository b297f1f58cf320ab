"""The cells of a grid, and MLflow's records of them for the results file.

Each cell has its own configuration, and all are checked before the first one starts.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from conf.effect import refuse_idle, refuse_without_effect
from conf.grid import Cell, read_grid, section_with
from conf.keys import choices, without_tag
from conf.load import base_of, flat, keys_of, override, resolve
from conf.schema import RunConfig
from jobs.shell.command import USER_ERROR, exit_code, say
from jobs.shell.paths import with_absolute_paths
from pipelines.comparison.grid_results import CellLine, ResultsFile
from pipelines.comparison.run import CURVE_GROUPS, CURVES, compared_run
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.tracking.store.experiments import chosen_experiment, experiment_of, name_in_store
from pipelines.tracking.store.recorded import DIVERGED_TAG, RecordedRun, TaggedRun, recorded_training, runs_with_tag
from pipelines.tracking.store.served import find_model
from pipelines.tracking.store.store import TrackingError, tracking_uri
from pipelines.training.driver.checks import check_dataset, check_output
from pipelines.training.driver.identity import NAMED_DIGITS, training_digest

_LONGEST_NAME = 120

CELL_TAG = "grid_cell"
"""Tag of a cell's run: the digest with which the same command finds the run again."""
_HISTORY_ROWS = 50


@dataclass(frozen=True)
class PlannedCell:
    """One training of a grid."""

    cell: Cell
    config: RunConfig
    manifest: Manifest
    digest: str

    def check_dataset_stays(self) -> None:
        """Check, before the cell is trained, that the dataset is still the one for which it was planned.

        Raises:
            FileNotFoundError, ValueError: The dataset was deleted or replaced.
        """
        if read_manifest(self.config.dataset.path).fingerprint != self.manifest.fingerprint:
            raise ValueError(
                f"cell {self.cell.number}: the dataset {self.config.dataset.path} was replaced while the grid was "
                "trained: the same command trains all cells on the new one"
            )

    @property
    def experiment(self) -> str:
        """Name of the experiment of the cell's run."""
        return chosen_experiment(self.config.tracking.experiment)

    @property
    def name(self) -> str:
        """Name of the cell's run: the settings of the grid without the sections' names, and digits of the digest."""
        parts = [
            str(value) if key.removesuffix(".name") in choices() else f"{key.rpartition('.')[2]}={value}"
            for key, value in flat(self.cell.values)
        ]
        return f"{(' '.join(parts) or 'cell')[:_LONGEST_NAME]} {self.digest[:NAMED_DIGITS]}"


def plan_cells(arguments: argparse.Namespace) -> list[PlannedCell]:
    """Return the cells of a grid file; a cell that occurs twice is trained once.

    Args:
        arguments: Arguments of the verb: the configuration and its settings, and the grid file.

    Raises:
        FileNotFoundError: The grid file does not exist.
        ValueError: A cell cannot be trained; the message names the cell.
        RuntimeError: A cell cannot be trained now, but perhaps later; the message names the cell.
    """
    cells = read_grid(arguments.grid)
    for key in map(without_tag, keys_of(arguments.set)):
        if all(key in cell.values for cell in cells):
            raise ValueError(f"--set {key} has no effect: every cell of {arguments.grid} sets it")
        for cell in cells:
            section = section_with(cell.values, key)
            if section is not None:
                raise ValueError(f"--set {key}: cell {cell.number} ({cell.text}) sets it too, within {section}")
    planned: dict[str, PlannedCell] = {}
    for cell in cells:
        try:
            found = _planned(cell, arguments)
        except (ValueError, OSError, RuntimeError) as error:
            raise named(error, cell) from None
        first = planned.setdefault(found.digest, found)
        if first.config != found.config:
            raise ValueError(
                f"cells {first.cell.number} ({first.cell.text}) and {cell.number} ({cell.text}) of {arguments.grid} "
                "are one training: what they differ in has no influence on its result"
            )
    return list(planned.values())


def named(error: Exception, cell: Cell) -> Exception:
    """Return the error with the cell's number and settings before it, of a kind with the same exit code."""
    text = f"cell {cell.number} ({cell.text}): {error}"
    return ValueError(text) if exit_code(error) == USER_ERROR else RuntimeError(text)


def _planned(cell: Cell, arguments: argparse.Namespace) -> PlannedCell:
    config = resolve(arguments.config, [*arguments.set, *cell.settings], option="")
    keys = list(cell.values)
    refuse_without_effect(config, keys, verb=arguments.verb, reads=arguments.reads, ignores=arguments.ignores)
    refuse_idle(config, base_of(arguments.config), keys, f"config {arguments.config}: ")
    if config.tracking.offline:
        raise ValueError("tracking.offline=true: a grid finds the runs of its cells in MLflow, set it to false")
    config = with_fixed_source(with_absolute_paths(config))
    manifest = check_dataset(config)
    check_output(config.training, config.dataset.path)
    return PlannedCell(cell, config, manifest, training_digest(config, manifest.fingerprint))


def with_fixed_source(config: RunConfig) -> RunConfig:
    """Replace an alias by the model version that it means now: later it may mean another version."""
    source = config.warm_start.source
    if source is None or not source.startswith("models:/") or not ("@" in source or source.endswith("/latest")):
        return config
    return override(config, warm_start={"source": find_model(source).uri})


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
