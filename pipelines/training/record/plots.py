"""The plots of one training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from pipelines.machine.cell_figure import CellFigure
from pipelines.tracking.metrics import AVERAGED_GROUP, VALIDATION_GROUP
from pipelines.training.finders.rates import RatePoint, Suggestion
from pipelines.training.record.phases import PHASES, StepPhases

_WIDTH_INCHES = 9.0


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
    figure = Figure(figsize=(_WIDTH_INCHES / 2, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.plot(range(len(rates)), rates)
    axis.set(xlabel="step", title="learning rate")
    axis.grid(alpha=0.3)
    return figure


def schedule_curve(rates: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Plot the learning rate of one or more schedules by epoch.

    Args:
        rates: Pairs (epoch, rate) in rising order, by the schedule's name. Several schedules have a logarithmic axis.
    """
    figure = Figure(figsize=(_WIDTH_INCHES, 4.0 if len(rates) == 1 else 7.0), layout="constrained")
    axis = figure.subplots()
    for number, (name, points) in enumerate(rates.items()):
        dashes = ("-", "--", ":")[number // 10 % 3]  # the colours repeat after ten lines
        axis.plot([epoch for epoch, _ in points], [rate for _, rate in points], dashes, label=name)
    axis.set(xlabel="epoch", ylabel="learning rate")
    axis.grid(alpha=0.3)
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
    figure = Figure(figsize=(_WIDTH_INCHES, 4.0), layout="constrained")
    axis = figure.subplots()
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
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def per_class_bars(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plot F1 and average precision of each class, the most frequent on top, with sample counts in brackets."""
    ordered = sorted(rows, key=lambda row: row["support"])
    figure = Figure(figsize=(_WIDTH_INCHES, 1.2 + 0.36 * len(ordered)), layout="constrained")
    axis = figure.subplots()
    positions = range(len(ordered))
    axis.barh([position + 0.2 for position in positions], [row["f1"] for row in ordered], 0.38, label="F1")
    axis.barh(
        [position - 0.2 for position in positions],
        [row["average_precision"] for row in ordered],
        0.38,
        label="average precision",
    )
    axis.set_yticks(list(positions), [f"{_short(row['class'])} ({row['support']})" for row in ordered])
    axis.set(xlim=(0, 1), ylim=(-0.6, len(ordered) - 0.4), title=title)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right")
    return figure


def _short(name: str, length: int = 44) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
