"""`groundswell grid`: trains a configuration at every cell of a grid; the same command continues a stopped grid."""

import argparse
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pyspark.sql import SparkSession

from conf.load import flat
from jobs.grids.cells import CELL_TAG, PlannedCell, add_unread, ended_run, line_of, named, parent_of, plan_cells
from jobs.shell import cli
from jobs.shell.command import JobsFailedError, Result, exit_code, message_of, say
from jobs.shell.paths import check_outside_datasets
from jobs.shell.records import tags_of, write_run
from jobs.shell.session import spark_session
from jobs.train import check_run, train_on
from pipelines.comparison.grid_results import CellLine, GridLine, ResultsFile, cells_of, estimated_seconds, read_lines
from pipelines.comparison.tables import csv_of, duration
from pipelines.launch.driver.preflight import check_cluster
from pipelines.storage.locations import redacted
from pipelines.tracking.journal.local_run import DESCRIPTION_TAG
from pipelines.tracking.journal.sync import DRIVER_DIED
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.metrics import is_lower_better
from pipelines.tracking.store import queries, runs, store
from pipelines.tracking.store.recorded import DIVERGED_TAG, PARENT_TAG, TaggedRun, runs_with_tag
from pipelines.training.checkpoint.files import list_checkpoints
from pipelines.training.driver.output import checkpoints_of
from pipelines.training.driver.run import is_divergence

_LONGEST_ERROR = 300


class Grid:
    """Trains the cells of a grid one after the other in one Spark session."""

    def __init__(self, cells: Sequence[PlannedCell], results: ResultsFile, parent: store.TrackedRun) -> None:
        """Take the cells, the file that records the finished ones, and the parent run of the cells' runs."""
        self._cells, self._results, self._parent = cells, results, parent
        self.codes: set[int] = set()
        """Exit codes of the errors with which cells failed."""

    def train(self, spark: SparkSession) -> None:
        """Train every cell that is not done. A failed cell is recorded, and the next one begins.

        Raises:
            FileNotFoundError, ValueError: The dataset was removed or replaced, or the experiment was renamed.
            RuntimeError: Spark's JVM has died.
        """
        waiting = open_cells(self._cells, self._results.cells)
        for place, planned in enumerate(waiting, 1):
            say("", f"cell {planned.cell.number}: {planned.cell.text}")
            planned.check_dataset_stays()
            line = self._result_of(spark, planned)
            self._results.append(line)
            say(f"cell {planned.cell.number} {line.status} in {duration(line.seconds)}, {self._left(waiting[place:])}")

    def _result_of(self, spark: SparkSession, planned: PlannedCell) -> CellLine:
        """Train one cell, or take the result of an earlier process that did not record it."""
        parent_of(self._results, planned.experiment)  # the experiment may be renamed during a grid of several days
        found = runs_with_tag(planned.experiment, CELL_TAG, planned.digest)
        done = ended_run(found)
        if done is not None:
            diverged = "" if done.status == "FINISHED" else done.tags[DIVERGED_TAG]
            say(f"MLflow run {done.run_id} is its {'training, which diverged' if diverged else 'finished training'}")
            return line_of(planned, "diverged" if diverged else "finished", done.run_id, done.seconds, error=diverged)
        self._end_dead(found, planned)
        continued = _resumable(found, planned)
        config = planned.config.with_values(tracking={"run_name": planned.name}, training={"resume_run": continued})
        result, started = Result("train"), time.monotonic()
        status: Literal["finished", "diverged", "failed"] = "finished"
        problem = ""
        try:
            check_run(config, planned.manifest)
            tags = {PARENT_TAG: self._parent.run_id, CELL_TAG: planned.digest}
            train_on(spark, config, planned.manifest, result, tags)
        except Exception as error:
            if not _is_alive(spark):
                raise RuntimeError(f"Spark's JVM died in cell {planned.cell.number}; its log says why") from error
            status = "diverged" if is_divergence(error) else "failed"
            if status == "failed":
                self.codes.add(exit_code(error))
            problem = redacted(message_of(error).splitlines()[0])[:_LONGEST_ERROR]
            say(f"cell {planned.cell.number}: {problem}")
        seconds, resumed = time.monotonic() - started, continued is not None
        return line_of(planned, status, result.run_id, seconds, result.metrics, error=problem, resumed=resumed)

    def _end_dead(self, found: Sequence[TaggedRun], planned: PlannedCell) -> None:
        """End the runs of this grid that a killed driver left as running and that cannot be continued."""
        for run in found:
            ours = run.tags.get(PARENT_TAG) == self._parent.run_id
            if ours and run.status == "RUNNING" and not _has_checkpoints(run, planned):
                runs.end_failed_run(store.TrackedRun(self._parent.uri, run.run_id), "KILLED")

    def _left(self, cells: Sequence[PlannedCell]) -> str:
        if not cells:
            return "no cell is left"
        seconds = estimate(cells, list(self._results.cells.values()))
        about = "" if seconds is None else f", about {duration(seconds)}"
        return f"{len(cells)} of {len(self._cells)} left{about}"


def open_cells(cells: Sequence[PlannedCell], lines: Mapping[str, CellLine]) -> list[PlannedCell]:
    """Return the cells that are not done: new and failed ones."""
    return [each for each in cells if each.digest not in lines or not lines[each.digest].is_done]


def estimate(cells: Sequence[PlannedCell], finished: Sequence[CellLine]) -> float | None:
    """Estimate the total seconds of some cells; None: no cell is finished."""
    known = [
        seconds
        for each in cells
        if (seconds := estimated_seconds(each.cell.values, each.config.training.epochs, finished)) is not None
    ]
    return sum(known) if known else None


def plan_lines(cells: Sequence[PlannedCell], lines: Mapping[str, CellLine]) -> list[str]:
    """Return what `--dry-run` prints: a line per cell, and the estimate."""
    shown = [f"{'cell':>5} {'state':>9} {'time':>9}  settings"]
    for each in cells:
        line = lines.get(each.digest)
        if line is not None and line.is_done:
            # The time of a resumed cell before it was resumed is unknown.
            state, seconds = str(line.status), f"{'>' if line.resumed else ''}{duration(line.seconds)}"
        else:
            guess = estimate([each], list(lines.values()))
            state, seconds = "failed" if line else "open", "-" if guess is None else f"~{duration(guess)}"
        shown.append(f"{each.cell.number:>5} {state:>9} {seconds:>9}  {each.cell.text}")
    waiting = open_cells(cells, lines)
    total = estimate(waiting, list(lines.values()))
    about = "no estimate: no cell is finished yet" if total is None else f"about {duration(total)} by the finished ones"
    return [*shown, f"{len(waiting)} of {len(cells)} cells to train" + (f", {about}" if waiting else "")]


def run_grid(cells: Sequence[PlannedCell], results: ResultsFile, name: str, text: str, result: Result) -> None:
    """Train the cells that are not done, as children of one run.

    Args:
        cells: All cells.
        results: The file that records the finished cells.
        name: Name of the run if the configuration has none.
        text: Content of the grid file, which is stored with the run.
        result: Filled in while the grid runs.

    Raises:
        JobsFailedError: Some cells failed.
        ValueError: MLflow cannot use the store, or the experiment was deleted or renamed.
        RuntimeError: The cluster is too small, or Spark or MLflow is away.
    """
    add_unread(cells, results)
    waiting = open_cells(cells, results.cells)
    if not waiting:
        return
    first = waiting[0].config
    for experiment in sorted({each.experiment for each in waiting}):  # before Spark, which takes seconds to start
        runs.check_store(experiment)
        parent_of(results, experiment)
    with spark_session("groundswell grid", first.launch.master, gpus_per_worker=first.launch.gpus_per_worker) as spark:
        for each in waiting:
            try:
                check_cluster(spark, each.config.launch.num_workers, each.config.launch.gpus_per_worker)
            except (ValueError, RuntimeError) as error:
                raise named(error, each.cell) from None
        store.check_workers_reach(store.tracking_uri(), spark.sparkContext.master)
        parent = _parent(results, waiting[0].experiment, first.tracking.run_name or name)
        result.run_id, result.continue_with = parent.run_id, []
        result.save()
        say(f"{len(waiting)} of {len(cells)} cells to train, in MLflow children of run {parent.run_id}")
        with runs.ended(parent):
            if reason := write_run(parent, lambda writer: writer.text(text, "grid.yaml")):
                say(f"MLflow did not take the grid file: {reason}")
            grid = Grid(cells, results, parent)
            grid.train(spark)
            own = {name for line in results.cells.values() for name in line.metrics}
            if reason := write_run(
                parent, lambda writer: write_summary(writer, cells, results.cells, name), own_metrics=own
            ):
                say(f"MLflow did not take the summary of the grid: {reason}")
    failed = [line for each in cells if (line := results.cells.get(each.digest)) is not None and not line.is_done]
    if failed:
        raise JobsFailedError(
            f"{len(failed)} of {len(cells)} cells failed, the first with: {failed[0].error}. The same command tries "
            "them again",
            grid.codes,
        )


def write_summary(writer: RunWriter, cells: Sequence[PlannedCell], lines: Mapping[str, CellLine], name: str) -> None:
    """Write what a grid has found to its parent run.

    `leaderboard.csv` has a row for each trained cell, by its best epoch's score; those that did not end well are last.
    The run itself gets the metrics of the best cell's model, and its settings of the grid as tags. `compare.html` is
    the report of `groundswell compare`.
    """
    from jobs.compare import comparison_of  # it draws, and needs seconds to be imported

    found = {line.run.run_id: each for each in cells if (line := lines.get(each.digest)) and line.run}
    compared = comparison_of([run for each in found.values() if (run := lines[each.digest].run)], f"grid {name}")
    sign = 1 if is_lower_better(compared.metric) else -1
    trained = [facts for part in compared.parts for group in part.groups for facts in group.members]
    trained.sort(key=lambda facts: (not facts.counts, sign * (facts.best or 0.0)))
    rows = [
        {
            "place": place,
            "cell": found[facts.run.run_id].cell.number,
            **dict(flat(found[facts.run.run_id].cell.values)),
            f"{compared.metric} best": facts.best,
            "best epoch": facts.best_epoch,
            "ended": facts.trouble or "finished",
            "run_id": facts.run.run_id,
        }
        for place, facts in enumerate(trained, 1)
    ]
    writer.text(csv_of(rows), "leaderboard.csv")
    writer.text(compared.page, "compare.html")
    if trained and trained[0].counts:
        best = found[trained[0].run.run_id]
        values = best.cell.values
        varied = [key for key in values if any(each.cell.values.get(key) != values[key] for each in cells)]
        writer.metrics(lines[best.digest].metrics, step=0)
        writer.tags({"best_run": trained[0].run.run_id, **{f"best.{key}": str(values[key]) for key in varied}})


def _parent(results: ResultsFile, experiment: str, name: str) -> store.TrackedRun:
    """Continue the parent run of an earlier process if this store has it; else create one, and record it."""
    known = parent_of(results, experiment)
    if known is not None:
        parent = runs.continue_run(known)
        runs.set_tags(parent, dict.fromkeys(queries.tags(parent).keys() & DRIVER_DIED.keys(), ""))
        return parent
    about = (
        "The trainings of this grid are the runs below this one: the + before its name shows them and their charts. "
        f"`groundswell compare --experiment {experiment} --children` compares them."
    )
    parent = runs.start_run(experiment, name, {}, {**tags_of("grid"), DESCRIPTION_TAG: about})
    results.append(GridLine(parent=parent.run_id, experiment=experiment))
    return parent


def _resumable(found: Sequence[TaggedRun], planned: PlannedCell) -> str | None:
    """Return the newest interrupted run of a cell with checkpoints on this machine."""
    for run in found:
        if run.status != "FINISHED" and not run.tags.get(DIVERGED_TAG) and _has_checkpoints(run, planned):
            say(f"continuing run {run.run_id}, which is {run.status.lower()}")
            return run.run_id
    return None


def _has_checkpoints(run: TaggedRun, planned: PlannedCell) -> bool:
    return bool(list_checkpoints(checkpoints_of(planned.config.training.output, run.run_id)))


def _is_alive(spark: SparkSession) -> bool:
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:  # errors of Py4J and of sockets
        return False


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Train the cells as the command line says."""
    path: Path = arguments.results
    check_outside_datasets(f"--results {path}", path)
    cells, text = plan_cells(arguments), arguments.grid.read_text()  # the file may be changed while cells train
    result.dataset = cells[0].config.dataset.path
    if arguments.dry_run:
        say(*plan_lines(cells, cells_of(read_lines(path) if path.exists() else [])))
        return
    results = ResultsFile(path)
    try:
        run_grid(cells, results, arguments.grid.stem, text, result)
    finally:
        results.close()
        lines = results.cells
        states = Counter(lines[each.digest].status if each.digest in lines else "open" for each in cells)
        say(f"{len(cells)} cells: {', '.join(f'{number} {state}' for state, number in states.items())}")
    say(f"results  {path}", f"compare  groundswell compare --results {shlex.quote(str(path))}")


if __name__ == "__main__":
    cli.main("grid")
