"""The predictions as lines for the terminal, as CSV and as plots; all say that they are predictions."""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from pipelines.scaling.estimate import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS = {
    "seconds": "predicted_step_seconds",
    "low": "predicted_step_seconds_low",
    "high": "predicted_step_seconds_high",
    "images_per_second": "predicted_images_per_second",
    "efficiency": "predicted_efficiency",
    "binds": "predicted_bound_by",
    "hours": "predicted_hours",
    "cost": "predicted_cost",
}

CSV_MARK = _UNITS["seconds"].encode()
"""Bytes that the header of the table contains."""

_COLOURS = ("#3b7dd8", "#e07b1a", "#2f9e62", "#d24a4a", "#8e63c9", "#1499a6", "#c2559b", "#94832f")


def csv_of(rows: Sequence[Row]) -> str:
    """Return all rows with a header; the columns of predictions begin with `predicted_`."""
    names = [field.name for field in fields(Row)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_UNITS.get(name, name) for name in names])
    for row in rows:
        values = [getattr(row, name) for name in names]
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])
    return text.getvalue()


def lines_of(rows: Sequence[Row], dense: str | None) -> list[str]:
    """Return a table: for each number of workers the fastest codec, and the dense exchange for comparison.

    Args:
        rows: Rows of one kind of scaling, by workers.
        dense: Name of the codec that sends all gradients in float32; None: it is not among the rows.
    """
    lines = [
        f"{'workers':>7} {'batch':>6} {'codec':<10} {'step s':>9} {'interval':>19} {'images/s':>10} {'efficiency':>10} "
        f"{'hours':>9} {'cost':>10}  bound by"
    ]
    for workers in dict.fromkeys(row.workers for row in rows):
        here = [row for row in rows if row.workers == workers]
        best = min(here, key=lambda row: row.seconds)
        lines += [_line(row) for row in here if row is best or row.codec == dense]
    return lines


def _line(row: Row) -> str:
    interval = "-" if row.low is None or row.high is None else f"{row.low:.3g} to {row.high:.3g}"
    hours = "-" if row.hours is None else f"{row.hours:.3g}"
    cost = "-" if row.cost is None else f"{row.cost:,.2f}"
    return (
        f"{row.workers:>7,} {row.batch_size:>6,} {row.codec:<10} {row.seconds:>9.4g} {interval:>19} "
        f"{row.images_per_second:>10.4g} {100 * row.efficiency:>8.1f} % {hours:>9} {cost:>10}  {row.binds}"
    )


def figure_of(rows: Sequence[Row], title: str) -> "Figure":
    """Draw a row of two plots for each kind of scaling; all lines are dashed, because none is measured.

    Args:
        rows: Predictions.
        title: Title with the subject of the predictions.
    """
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.scaling for row in rows))
    figure = Figure(figsize=(11, 4.2 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, squeeze=False)
    codecs = list(dict.fromkeys(row.codec for row in rows))
    for kind, (left, right) in zip(kinds, panels, strict=True):
        for name, colour in zip(codecs, _COLOURS * len(codecs), strict=False):
            chosen = [row for row in rows if row.scaling == kind and row.codec == name]
            workers = [row.workers for row in chosen]
            left.plot(workers, [row.seconds for row in chosen], "o--", color=colour, markersize=3, label=name)
            if all(row.low is not None for row in chosen):
                lows, highs = [row.low for row in chosen], [row.high for row in chosen]
                left.fill_between(workers, lows, highs, color=colour, alpha=0.15, linewidth=0)
            right.plot(workers, [100 * row.efficiency for row in chosen], "o--", color=colour, markersize=3)
        left.set(xscale="log", yscale="log", ylabel="predicted seconds per step")
        right.set(xscale="log", ylabel="predicted efficiency, %")
        right.set_ylim(0, None)
        ticks = sorted({row.workers for row in rows if row.scaling == kind})
        for axes in (left, right):
            axes.set(xlabel="workers", title=f"{kind} scaling, predicted")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        left.legend(fontsize=8)
    figure.suptitle(f"Predicted, not measured: {title}", fontsize=11)
    return figure
