"""The plots of a model's predictions: precision and recall, confusion, the best and the worst predictions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipelines.training.ranks.predictions import Predictions, confusion, precision_recall

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


def precision_recall_curves(predictions: Predictions, rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plot precision over recall for at most the 20 most frequent classes, with their average precision.

    Args:
        predictions: Predictions of a whole split.
        rows: The per-class table of the split, in the order of the classes.
        title: Title of the plot.
    """
    figure = Figure(figsize=(_WIDTH_INCHES, 5.0), layout="constrained")
    axis = figure.subplots()
    by_frequency = sorted(range(len(rows)), key=lambda column: -rows[column]["support"])
    for number, column in enumerate(by_frequency[:_MOST_CURVES]):
        recall, precision = precision_recall(predictions, column)
        if len(recall):
            label = f"{_short(rows[column]['class'])} {rows[column]['average_precision']:.2f}"
            axis.plot(recall, precision, ("-", "--")[number // 10], linewidth=1.2, label=label)
    chosen = f" (the {_MOST_CURVES} most frequent of {len(rows)} classes)" if len(rows) > _MOST_CURVES else ""
    axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision", title=title + chosen)
    axis.grid(alpha=0.3)
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
            dark = counts[row, column] / whole[row, 0] > 0.5
            text = f"{counts[row, column]}"
            axis.text(column, row, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
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


def _short(name: str, length: int = 30) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
