"""`groundswell compare`: an HTML report, CSV and LaTeX on trainings of MLflow, of grids, and of other machines."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.sections.section import refuse
from jobs.shell import cli
from jobs.shell.command import Result, say
from jobs.shell.paths import check_outputs
from pipelines.comparison.facts import chosen_metric
from pipelines.comparison.grid_results import cells_of, read_lines, runs_of
from pipelines.comparison.groups import DatasetGroups, default_target, parts_of
from pipelines.comparison.page import LATEX_MARK, comparison_page, curves_of, html_of, latex_of, notes_of
from pipelines.comparison.run import (
    CURVE_GROUPS,
    CURVES,
    SAVED_MARK,
    ComparedRun,
    compared_run,
    read_runs,
    save_runs,
    write_text,
)
from pipelines.comparison.tables import CSV_MARK, csv_of, recipe_rows, runs_csv, table_rows
from pipelines.dataset.report.html import PAGE_MARK
from pipelines.dataset.report.tables import shorten
from pipelines.storage.locations import local_path
from pipelines.storage.whole_files import os_errors_as
from pipelines.tracking.store.recorded import recorded_trainings

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_SHOWN = 30
_LONGEST_TROUBLE = 80


def collect(
    experiments: Sequence[str],
    filter_text: str,
    *,
    children: bool,
    saved: Sequence[Path] = (),
    results: Sequence[Path] = (),
) -> list[ComparedRun]:
    """Read trainings from MLflow and from files; a training that occurs several times counts once.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: The experiment does not exist, no training fits, or a file is not one of ours.
        TrackingError: MLflow does not answer.
    """
    runs = {
        run.run_id: compared_run(run, experiment)
        for experiment in experiments
        for run in recorded_trainings(experiment, filter_text, children=children, groups=CURVE_GROUPS, metrics=CURVES)
    }
    read = [
        *((path, read_runs(path)) for path in saved),
        *((path, runs_of(read_lines(path), path.name)) for path in results),
    ]
    for path, of_file in read:
        if not of_file:
            raise ValueError(f"{path} has no trainings yet")
        runs.update((run.run_id, run) for run in of_file if run.run_id not in runs)
    return list(runs.values())


@dataclass(frozen=True)
class Comparison:
    """Compared trainings: a table and curves in a notebook, and files."""

    runs: Sequence[ComparedRun]
    parts: Sequence[DatasetGroups]
    """The groups, by dataset: groups of different datasets cannot be compared."""
    metric: str
    """The metric of the comparison."""
    targets: Sequence[float | None]
    """Target value of the metric, for each part; None: no target."""
    title: str
    left_out: Sequence[str] = ()
    """Sentences about trainings that are not compared."""

    @property
    def notes(self) -> list[str]:
        """Notes that a reader needs before the figures, one sentence each."""
        return [*self.left_out, *notes_of(self.parts, self.metric)]

    @property
    def table(self) -> "pandas.DataFrame":
        """A row per group of trainings that differ only in their seed, with full numbers as in `table.csv`."""
        import pandas

        return pandas.DataFrame(table_rows(self.parts, self.metric, self.targets))

    def plot(self) -> "Figure":
        """Plot the metric of every training by samples seen and by time."""
        return curves_of(self.parts, self.metric)

    @property
    def page(self) -> str:
        """The report as one HTML page, which needs no other file."""
        return comparison_page(self.parts, self.runs, self.metric, self.targets, self.title, self.notes)

    def write(self, folder: str | Path) -> None:
        """Write `report.html`, `table.csv` and `table.tex` with a row per group, and `runs.csv` with one per training.

        Raises:
            ValueError: The folder, which may be new, cannot be written, is misspelt (`locations.local_path`) or is in a
                dataset; or a file of this name in it is not one of ours.
        """
        folder = local_path(folder, "the folder of the report")
        check_outputs(f"the folder of the report {folder}", _files_in(folder))
        with os_errors_as(ValueError, f"the folder of the report {folder} cannot be made"):
            folder.mkdir(parents=True, exist_ok=True)
        texts = {
            "table.csv": csv_of(table_rows(self.parts, self.metric, self.targets)),
            "table.tex": latex_of(self.parts),
            "runs.csv": runs_csv(self.parts, self.metric),
            "report.html": self.page,
        }
        for name, text in texts.items():
            write_text(folder / name, text)

    def _repr_html_(self) -> str:
        return html_of(self.parts, self.metric, self.notes)


def comparison_of(
    runs: Sequence[ComparedRun],
    title: str,
    *,
    metric: str | None = None,
    target: float | None = None,
    left_out: Sequence[str] = (),
) -> Comparison:
    """Sort trainings into groups, and choose the metric of the comparison.

    Args:
        runs: The trainings.
        title: Title with the names of experiments and files.
        metric: Metric of the comparison; None: the first recorded one of top-1, micro F1 and loss.
        target: Target value of the metric; None: nearly the best value of each dataset.
        left_out: Sentences about trainings that are not compared.

    Raises:
        ValueError: The metric is missing in all trainings.
    """
    chosen = chosen_metric(runs, metric)
    parts = parts_of(runs, chosen)
    targets = [default_target(part.groups, chosen) if target is None else target for part in parts]
    return Comparison(runs, parts, chosen, targets, title, left_out)


def compare(
    *experiments: str,
    filter_text: str = "",
    children: bool = False,
    saved: Sequence[str | Path] = (),
    results: Sequence[str | Path] = (),
    metric: str | None = None,
    target: float | None = None,
) -> Comparison:
    """Compare trainings from MLflow, and from files of `groundswell grid` or `compare --save`.

    Args:
        experiments: Names of MLflow experiments.
        filter_text: MLflow's filter of their runs; empty: all.
        children: Whether runs with a parent, such as the cells of a grid, are included beside others. Where an
            experiment has no other training, they are.
        saved: Files of `compare --save`.
        results: Files of `groundswell grid`.
        metric: The same as in `comparison_of`.
        target: The same as in `comparison_of`.

    Raises:
        FileNotFoundError, ValueError, TrackingError: As `collect`; or no source is named, or no training has the
            metric.
    """
    if not (experiments or saved or results):
        raise ValueError("nothing to compare: name an experiment, or files by results or saved")
    files = [
        [local_path(name, argument) for name in names] for argument, names in (("saved", saved), ("results", results))
    ]
    runs = collect(experiments, filter_text, children=children, saved=files[0], results=files[1])
    title = ", ".join([*experiments, *(path.name for paths in files for path in paths)])
    left_out = [note for path in files[1] for note in _unread_cells(path)]
    return comparison_of(runs, title, metric=metric, target=target, left_out=left_out)


def _unread_cells(results: Path) -> list[str]:
    """Return sentences about the cells of a grid whose trainings are missing in its results file."""
    cells = cells_of(read_lines(results)).values()
    unread = [line for line in cells if line.is_done and line.run is None]
    if not unread:
        return []
    return [
        f"{len(unread)} of {len(cells)} cells of {results.name} are not shown, because MLflow could not be read when "
        "they ended. The command that trained the grid adds them."
    ]


def _files_in(folder: Path) -> dict[Path, bytes]:
    """Return the files that are written, each with the mark of an earlier file."""
    marks = {"table.csv": CSV_MARK, "table.tex": LATEX_MARK, "runs.csv": CSV_MARK, "report.html": PAGE_MARK}
    return {folder / name: mark for name, mark in marks.items()}


def lines_of(compared: Comparison) -> list[str]:
    """Return the text for the terminal: score, time and bytes of each group."""
    lines, parts = compared.notes, compared.parts
    for part in parts:
        lines += ["", f"dataset {part.archive} {part.dataset[:12]}".rstrip()] if len(parts) > 1 else []
        lines.append(f"{'':>4}{compared.metric:>17} {'time':>8} {'bytes':>8}  group")
        rows = recipe_rows(part)
        for row in rows[:_SHOWN]:
            means = f"; with the diverged {row['with_diverged']}" if row["diverged"] else ""
            marks = f"  ({shorten(row['mark'], _LONGEST_TROUBLE)}{means})" if row["mark"] else ""
            lines.append(
                f"{row['number']:>3} {row['score']:>17} {row['time']:>8} {row['bytes']:>8}  {row['label']}{marks}"
            )
        if len(rows) > _SHOWN:
            lines.append(f"    and {len(rows) - _SHOWN} more groups, see the report")
    return lines


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Compare as the command line says."""
    refuse(
        (
            not (arguments.experiment or arguments.saved or arguments.results),
            "nothing to compare: name trainings with --experiment, --results or --saved",
        ),
        *(
            (
                getattr(arguments, option) and not arguments.experiment,
                f"--{option} has no effect without --experiment: files are read as a whole",
            )
            for option in ("filter", "children")
        ),
        (
            arguments.target is not None and not math.isfinite(arguments.target),
            f"--target {arguments.target} should be a number",
        ),
    )
    folder: Path = arguments.output
    check_outputs(f"--output {folder}", _files_in(folder))
    if arguments.save is not None:
        inputs = [file.resolve() for file in (*arguments.saved, *arguments.results)]
        if arguments.save.resolve() in inputs:
            raise ValueError(f"--save {arguments.save} is compared, and would be replaced: choose another file")
        check_outputs(f"--save {arguments.save}", {arguments.save: SAVED_MARK})
    compared = compare(
        *arguments.experiment,
        filter_text=arguments.filter or "",
        children=arguments.children,
        saved=arguments.saved,
        results=arguments.results,
        metric=arguments.metric,
        target=arguments.target,
    )
    compared.write(folder)
    say(*lines_of(compared))
    if arguments.save is not None:
        save_runs(compared.runs, arguments.save)
        say(f"saved   {arguments.save}")
    say(
        f"report  {folder / 'report.html'}",
        f"tables  {folder / 'table.csv'}, {folder / 'table.tex'}, {folder / 'runs.csv'}",
    )


if __name__ == "__main__":
    cli.main("compare")
