"""The plots of one training: its curves, its steps, and its predictions."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipelines.machine.cell_figure import CellFigure
from pipelines.tracking.metrics import AVERAGED_GROUP, VALIDATION_GROUP
from pipelines.training.finders.rates import RatePoint, Suggestion
from pipelines.training.ranks.predictions import Predictions, confusion, precision_recall
from pipelines.training.record.phases import PHASES, StepPhases

_WIDTH_INCHES = 9.0
_MOST_CURVES = 20
MOST_CLASSES = 60
"""The largest number of classes whose confusion matrix is readable in a picture."""
_PER_ROW = 8
_CELL_WIDTH, _CELL_HEIGHT = 1.7, 2.5
"""The size of an image with its text, in inches."""
_GAP, _LINE_INCHES, _HEADING_INCHES = 0.06, 0.12, 0.35
SHOWN = 16
"""The number of best and of worst predictions that are shown."""

Pixels = NDArray[np.uint8]


def learning_curves(history: Sequence[Mapping[str, float]]) -> CellFigure:
    """Plot loss and scores by epoch, from one mapping of metrics per epoch."""
    figure = CellFigure(figsize=(_WIDTH_INCHES, 3.6), layout="constrained")
    loss, score = figure.subplots(1, 2)
    epochs = range(1, len(history) + 1)
    for axis, names in (
        (loss, {"train/loss": "training", "val/loss": "validation"}),
        (
            score,
            {
                "val/top_1": "top-1",
                "val/top_5": "top-5",
                "val/f1_micro": "F1 micro",
                "val/f1_macro": "F1 macro",
                "val/mean_average_precision": "mean average precision",
            },
        ),
    ):
        for name, label in names.items():
            if name in history[0]:
                (line,) = axis.plot(epochs, [row[name] for row in history], marker="o", markersize=3, label=label)
                averaged = name.replace(f"{VALIDATION_GROUP}/", f"{AVERAGED_GROUP}/")
                if averaged != name and averaged in history[0]:
                    axis.plot(
                        epochs,
                        [row[averaged] for row in history],
                        "--",
                        color=line.get_color(),
                        label=f"{label}, averaged weights",
                    )
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    loss.set_title("loss")
    score.set(title="validation", ylim=(0, 1))
    return figure


def where_the_step_goes(history: Sequence[Mapping[str, float]], last: StepPhases) -> Figure:
    """Plot the time of a step by phase: per epoch as the mean over the ranks, and per rank in the last epoch.

    Args:
        history: Metrics of each epoch. Epochs without a step of this process have no phases and are left out.
        last: The phases of the last epoch.
    """
    figure = Figure(figsize=(_WIDTH_INCHES, 3.9), layout="constrained")
    by_epoch, by_rank = figure.subplots(1, 2, sharey=True)
    known = [(epoch, row) for epoch, row in enumerate(history, 1) if "time/step_compute_seconds" in row]
    by_phase = [{name: row[f"time/step_{name}_seconds"] for name in PHASES} for _, row in known]
    ranks = len(last.seconds)
    for axis, positions, columns in (
        (by_epoch, [epoch for epoch, _ in known], by_phase),
        (by_rank, list(range(ranks)), list(last.seconds)),
    ):
        bottom = [0.0] * len(positions)
        for name in PHASES:
            heights = [1000 * column[name] for column in columns]
            axis.bar(positions, heights, bottom=bottom, width=0.9, label=name)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y", alpha=0.3)
    by_epoch.set(xlabel="epoch", ylabel="milliseconds of a step", title="mean of the ranks")
    slowest = f" (slowest: rank {last.slowest_rank})" if ranks > 1 else ""
    by_rank.set(xlabel="rank", title=f"last epoch{slowest}")
    handles, labels = by_epoch.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PHASES), fontsize=8)
    return figure


def learning_rate_curve(rates: Sequence[float]) -> Figure:
    """Plot the learning rate by optimizer step."""
    figure, axis = _one_axis(_WIDTH_INCHES / 2, 3.2)
    axis.plot(range(len(rates)), rates)
    axis.set(xlabel="step", title="learning rate")
    return figure


def schedule_curve(rates: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Plot the learning rate of one or more schedules by epoch.

    Args:
        rates: Pairs (epoch, rate) in rising order, by the schedule's name. Several schedules have a logarithmic axis.
    """
    figure, axis = _one_axis(_WIDTH_INCHES, 4.0 if len(rates) == 1 else 7.0)
    for number, (name, points) in enumerate(rates.items()):
        dashes = ("-", "--", ":")[number // 10 % 3]  # the colours repeat after ten lines
        axis.plot([epoch for epoch, _ in points], [rate for _, rate in points], dashes, label=name)
    axis.set(xlabel="epoch", ylabel="learning rate")
    if len(rates) == 1:
        axis.set_ylim(bottom=0)
        axis.set_title(next(iter(rates)))
    else:
        axis.set_yscale("log")
        # A cosine ends near 0, which would compress the rest of the plot.
        axis.set_ylim(bottom=1e-7 * max(rate for points in rates.values() for _, rate in points))
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def range_test_curve(points: Sequence[RatePoint], suggestion: Suggestion | None) -> Figure:
    """Plot loss and smoothed loss of a range test by learning rate, and mark the suggested rate."""
    figure, axis = _one_axis(_WIDTH_INCHES, 4.0)
    rates = [point.rate for point in points]
    axis.plot(rates, [point.loss for point in points], color="0.7", label="loss")
    axis.plot(rates, [point.smoothed for point in points], label="smoothed")
    if suggestion is not None:
        axis.axvline(suggestion.rate, color="tab:green", linestyle="--", label=f"suggestion {suggestion.rate:.3g}")
    axis.set_xscale("log")
    # A loss that explodes at the end would compress the rest of the plot.
    finite = [point.smoothed for point in points if math.isfinite(point.smoothed)]
    if finite:
        first, least = finite[0], min(finite)
        top = min(max(finite), first + max(abs(first), first - least))
        axis.set_ylim(top=top + 0.1 * max(abs(top), top - least))
    axis.set(xlabel="learning rate", title="range test")
    axis.legend()
    return figure


def per_class_bars(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plot F1 and average precision of each class, the most frequent on top, with sample counts in brackets."""
    ordered = sorted(rows, key=lambda row: row["support"])
    figure, axis = _one_axis(_WIDTH_INCHES, 1.2 + 0.36 * len(ordered), grid="x")
    positions = range(len(ordered))
    axis.barh([position + 0.2 for position in positions], [row["f1"] for row in ordered], 0.38, label="F1")
    axis.barh(
        [position - 0.2 for position in positions],
        [row["average_precision"] for row in ordered],
        0.38,
        label="average precision",
    )
    axis.set_yticks(list(positions), [f"{_short(row['class'], 44)} ({row['support']})" for row in ordered])
    axis.set(xlim=(0, 1), ylim=(-0.6, len(ordered) - 0.4), title=title)
    axis.legend(loc="lower right")
    return figure


def precision_recall_curves(predictions: Predictions, rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plot precision over recall for at most the 20 most frequent classes, with their average precision.

    Args:
        predictions: Predictions of a whole split.
        rows: The per-class table of the split, in the order of the classes.
        title: Title of the plot.
    """
    figure, axis = _one_axis(_WIDTH_INCHES, 5.0)
    by_frequency = sorted(range(len(rows)), key=lambda column: -rows[column]["support"])
    for number, column in enumerate(by_frequency[:_MOST_CURVES]):
        recall, precision = precision_recall(predictions, column)
        if len(recall):
            label = f"{_short(rows[column]['class'])} {rows[column]['average_precision']:.2f}"
            axis.plot(recall, precision, ("-", "--")[number // 10], linewidth=1.2, label=label)
    chosen = f" (the {_MOST_CURVES} most frequent of {len(rows)} classes)" if len(rows) > _MOST_CURVES else ""
    axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision", title=title + chosen)
    if axis.lines:
        figure.legend(loc="outside right upper", fontsize=7, title="average precision", title_fontsize=7)
    return figure


def confusion_picture(predictions: Predictions, class_names: Sequence[str], title: str) -> Figure:
    """Plot the confusion matrix as fractions of each row; see `confusion`."""
    counts = confusion(predictions)
    whole = np.maximum(counts.sum(1, keepdims=True), 1)
    size = 3.2 + 0.24 * len(class_names)
    figure = Figure(figsize=(size + 1.2, size), layout="constrained")
    axis = figure.subplots()
    shown = axis.imshow(counts / whole, cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(class_names))
    axis.set_xticks(ticks, [_short(name) for name in class_names], rotation=90, fontsize=7)
    axis.set_yticks(ticks, [_short(name) for name in class_names], fontsize=7)
    multi_label = predictions.task == "multi_label"
    axis.set(
        xlabel="label that was predicted and wrong" if multi_label else "predicted class",
        ylabel="label that was missed (diagonal: found)" if multi_label else "class",
        title=title,
    )
    if len(class_names) <= _MOST_CURVES:
        for row, column in zip(*np.nonzero(counts), strict=True):
            color = "white" if counts[row, column] / whole[row, 0] > 0.5 else "black"
            axis.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6, color=color)
    figure.colorbar(shown, ax=axis, shrink=0.6, label="part of the row")
    return figure


def contact_sheet(
    predictions: Predictions, class_names: Sequence[str], image_of: Callable[[int], Pixels], title: str
) -> Figure:
    """Show the images with the worst and the best predictions, with their true and predicted classes.

    Args:
        predictions: Predictions of a whole split.
        class_names: Names of the classes, in the order of the predictions.
        image_of: Returns the pixels `(height, width, 3)` of a row of the split.
        title: Title of the sheet.
    """
    worst, best = predictions.extremes(SHOWN)
    lines = -(-max(len(worst), 1) // _PER_ROW)
    part_height = _HEADING_INCHES + lines * _CELL_HEIGHT
    width, height = _PER_ROW * _CELL_WIDTH, _HEADING_INCHES + 2 * part_height
    figure = Figure(figsize=(width, height))
    # One axis in inches for all images, because the layout of an axis per image would take seconds.
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    axis.text(width / 2, 0.6 * _HEADING_INCHES, title, ha="center", va="center", fontsize=12)
    decisions, losses = predictions.decisions, predictions.losses
    for number, (name, samples) in enumerate((("highest losses", worst), ("lowest losses", best))):
        top = _HEADING_INCHES + number * part_height
        axis.text(width / 2, top + 0.6 * _HEADING_INCHES, name, ha="center", va="center", fontsize=9)
        for index, sample in enumerate(samples):
            row, column = divmod(index, _PER_ROW)
            corner = column * _CELL_WIDTH + _GAP, top + _HEADING_INCHES + row * _CELL_HEIGHT
            truth = _names(predictions.targets[sample] > 0, class_names)
            text = f"is: {truth}\npredicted: {_names(decisions[sample], class_names)}"
            _show_image(axis, corner, image_of(int(predictions.rows[sample])), f"loss {losses[sample]:.2f}", text)
    return figure


def _show_image(axis: Axes, corner: tuple[float, float], pixels: Pixels, above: str, below: str) -> None:
    """Draw one image as large as possible in its cell; `corner` is the upper left corner of the cell."""
    left, top = corner
    side = _CELL_WIDTH - 2 * _GAP
    rows, columns = pixels.shape[:2]
    width, height = side * columns / max(rows, columns), side * rows / max(rows, columns)
    axis.text(left, top, above, ha="left", va="top", fontsize=6)
    image_top = top + _LINE_INCHES
    axis.imshow(
        pixels, extent=(left, left + width, image_top + height, image_top), aspect="auto", interpolation="nearest"
    )
    axis.text(left, image_top + side + _GAP, below, ha="left", va="top", fontsize=5.5)


def _names(chosen: NDArray[np.bool_], class_names: Sequence[str], most: int = 2) -> str:
    names = [_short(class_names[index], 24) for index in np.flatnonzero(chosen)]
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return "\n".join([*names[:most], *more]) or "nothing"


def _one_axis(width: float, height: float, grid: Literal["both", "x"] = "both") -> tuple[Figure, Axes]:
    """Return a figure of this size in inches, and its only axis, which has a light grid."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.grid(axis=grid, alpha=0.3)
    return figure, axis


def _short(name: str, length: int = 30) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
