"""The view of a comparison in a notebook: a table, curves, and both as HTML."""

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from pipelines.comparison import figures
from pipelines.comparison.groups import Part
from pipelines.comparison.tables import recipe_rows, table_rows
from pipelines.dataset.report.figures import Colors
from pipelines.dataset.report.tables import shorten
from pipelines.machine.cell_figure import CellFigure

if TYPE_CHECKING:
    import pandas

_COLUMNS = {
    "number": "group",
    "label": "what differs",
    "seeds": "seeds",
    "score": "best score",
    "last": "last score",
    "time": "time",
    "rate_of_images": "images/s",
    "bytes": "bytes of a rank",
    "diverged": "diverged",
}
_ON_WHITE = Colors(text="#333333", fill="#3b74c4", mark="#b3410e")
_WIDTH_INCHES, _HEIGHT_INCHES = 9.0, 3.6
_LEGEND_LETTERS = 60


def table_of(parts: Sequence[Part], metric: str, targets: Sequence[float | None]) -> "pandas.DataFrame":
    """Return a row per group with full numbers, as in `table.csv`."""
    import pandas

    return pandas.DataFrame(table_rows(parts, metric, targets))


def curves_of(parts: Sequence[Part], metric: str) -> CellFigure:
    """Plot the metric of every training by samples seen and by training time, with a row of plots per dataset."""
    figure = CellFigure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES * len(parts)), layout="constrained")
    for plots, part in zip(figure.subplots(len(parts), 2, squeeze=False), parts, strict=True):
        colors = figures.colors_of(part.groups, metric)
        for plot, axis in zip(plots, (figures.SAMPLES, figures.TIME), strict=True):
            lines = figures.lines_over(part.groups, metric, axis, colors)
            if lines:
                figures.draw_lines(plot, _ON_WHITE, lines, metric, axis)
            else:
                plot.set_axis_off()
                plot.text(0.5, 0.5, f"{metric} by {axis.label} is not recorded", ha="center", transform=plot.transAxes)
        named = [group for group in part.groups if colors[group.number] != figures.GREY]
        keys = [Line2D([], [], color=colors[group.number]) for group in named]
        plots[0].legend(
            keys, [f"{group.number} {shorten(group.label, _LEGEND_LETTERS)}" for group in named], fontsize=8
        )
    return figure


def html_of(parts: Sequence[Part], metric: str, notes: Sequence[str]) -> str:
    """Return notes, the recipe and score of each group, and the curves as HTML."""
    import pandas

    picture = io.BytesIO()
    curves_of(parts, metric).savefig(picture, format="png", dpi=90)
    image = base64.b64encode(picture.getvalue()).decode()
    texts = [f"<p>{html.escape(note)}</p>" for note in notes]
    for part in parts:
        rows = pandas.DataFrame(recipe_rows(part))[list(_COLUMNS)].rename(columns=_COLUMNS)
        named = f"<p>dataset {html.escape(part.archive)} {html.escape(part.dataset[:12])}</p>" if len(parts) > 1 else ""
        texts.append(f"{named}{rows.to_html(index=False, border=0)}")
    alt = html.escape(f"{metric} by samples and by time")
    return f'{"".join(texts)}<img alt="{alt}" src="data:image/png;base64,{image}">'
