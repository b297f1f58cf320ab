"""The predictions as lines for the terminal and as CSV; both say that they are predictions."""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields

from pipelines.scaling.estimate import Row

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
