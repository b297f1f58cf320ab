"""The plots of predictions: step time and efficiency over the number of workers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.scaling.estimate import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#3b7dd8", "#e07b1a", "#2f9e62", "#d24a4a", "#8e63c9", "#1499a6", "#c2559b", "#94832f")


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
