"""The plots of a comparison, each in a light and a dark scheme."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, NullLocator

from pipelines.comparison.groups import DatasetGroups, Group, Spread, best_group, labels_of, rank
from pipelines.comparison.run import PAYLOAD, SECONDS, STEP, ComparedRun
from pipelines.dataset.report.figures import Colors, Plot
from pipelines.dataset.report.figures import plot as themed_plot
from pipelines.tracking.metrics import is_lower_better

PALETTE = ("#3b7dd8", "#e07b1a", "#2f9e62", "#d24a4a", "#8e63c9", "#1499a6", "#c2559b", "#94832f")
"""Colours that are easy to distinguish on white and on black."""
GREY = "#8d96a3"
WIDE, NARROW = 680, 344
"""Widths of a plot on a desktop and on a phone, in CSS pixels."""
_MARGINS = (50, 12, 40, 10)
_FONT = 8
_FOLLOWS_THE_BATCH = (
    "global_batch_size",
    "launch.num_workers",
    "micro_batches_per_step",
    "training.batch_size_per_worker",
    "optimizer.learning_rate",
    "optimizer.learning_rate_per_256",
    "optimizer.scaling",
)
"""Settings whose best value is used at each batch size."""


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a curve."""

    column: str
    label: str
    per_sample: bool = False
    """Whether the column counts steps, which are shown as samples."""


SAMPLES = Axis(STEP, "samples", per_sample=True)
TIME = Axis(SECONDS, "seconds of training")
BYTES = Axis(PAYLOAD, "bytes given by one rank")


@dataclass(frozen=True)
class BatchSizeSeries:
    """The best group at each batch size, among groups that agree in all settings that do not depend on it."""

    label: str
    points: tuple[tuple[int, Spread], ...]
    """Global batch size and score."""
    diverged: tuple[int, ...]
    """Batch sizes at which no training ended well and at least one diverged."""


def colors_of(groups: Sequence[Group], metric: str) -> dict[int, str]:
    """Return the colour by number of the group: the best groups have their own colours, the others are grey."""
    best = sorted(groups, key=lambda group: rank(group, metric))[: len(PALETTE)]
    shown = sorted(group.number for group in best)
    return {group.number: GREY for group in groups} | dict(zip(shown, PALETTE, strict=False))


@dataclass(frozen=True)
class Line:
    """One metric of one training."""

    color: str
    points: list[tuple[float, float]]
    is_diverged: bool


def lines_over(groups: Sequence[Group], name: str, axis: Axis, colors: dict[int, str]) -> list[Line]:
    """Return one metric of every training that recorded it; grey lines come first, so that the others cover them."""
    return [
        Line(colors[group.number], points, facts.is_diverged)
        for group in sorted(groups, key=lambda group: colors[group.number] != GREY)
        for facts in group.members
        if (points := _points(facts.run, name, axis))
    ]


def curves(groups: Sequence[Group], name: str, axis: Axis, colors: dict[int, str]) -> Plot | None:
    """Draw one metric of every training by samples, time or bytes; return None if nothing is recorded."""
    lines = lines_over(groups, name, axis, colors)
    if not any(len(line.points) > 1 for line in lines):
        return None
    return themed_plot(lambda plot, scheme: draw_lines(plot, scheme, lines, name, axis), NARROW, 258, _MARGINS)


def draw_lines(plot: Axes, scheme: Colors, lines: Sequence[Line], name: str, axis: Axis) -> None:
    """Draw one metric of one or more trainings over an axis; a cross marks a divergence."""
    for line in lines:
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        width, alpha = (0.8, 0.6) if line.color == GREY else (1.5, 1.0)
        marker = None if len(xs) > 1 else "o"
        plot.plot(xs, ys, color=line.color, marker=marker, linewidth=width, alpha=alpha)
        if line.is_diverged:
            plot.plot(xs[-1:], ys[-1:], "x", color=line.color, markersize=6)
    ends = [line.points[-1][0] for line in lines if line.points[-1][0] > 0]
    if ends and max(ends) / min(ends) > 20:
        plot.set_xscale("log")
        plot.xaxis.set_minor_formatter(NullFormatter())
    else:
        plot.set_xlim(left=0)
        plot.xaxis.set_major_locator(MaxNLocator(5))
    plot.xaxis.set_major_formatter(EngFormatter(sep=""))
    _limit(plot, [[y for _, y in line.points] for line in lines], name)
    # Steps of 2.5 need one more digit: the numbers would push the label out of the picture.
    plot.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    _label(plot, scheme, axis.label, name)


def variants_of(part: DatasetGroups, metric: str) -> list[BatchSizeSeries]:
    """Return the score by batch size, one series for each choice of the settings that do not depend on it."""
    keys = [key for key in part.differing if key not in _FOLLOWS_THE_BATCH]
    telling: dict[tuple[str | None, ...], list[Group]] = {}
    for group in part.groups:
        telling.setdefault(tuple(group.settings.get(key) for key in keys), []).append(group)
    labels = labels_of([groups[0].settings for groups in telling.values()], keys)
    variants = [_variant(groups, label, metric) for groups, label in zip(telling.values(), labels, strict=True)]
    shown = [variant for variant in variants if variant.points or variant.diverged]
    return sorted(shown, key=lambda variant: -len(variant.points))


def variant_colors(variants: Sequence[BatchSizeSeries]) -> list[str]:
    """Return the colour of each series; the series after the first ones are grey."""
    return [PALETTE[place] if place < len(PALETTE) else GREY for place in range(len(variants))]


def over_batch(variants: Sequence[BatchSizeSeries], metric: str, width: int) -> Plot:
    """Draw the score by global batch size, with the deviation over seeds; a cross below marks a diverged batch size."""
    sizes = sorted({size for each in variants for size in [*(size for size, _ in each.points), *each.diverged]})

    def draw(plot: Axes, scheme: Colors) -> None:
        for variant, color in zip(variants, variant_colors(variants), strict=True):
            if variant.points:
                xs, spreads = zip(*variant.points, strict=True)
                bars = [spread.deviation or 0.0 for spread in spreads]
                values = [spread.mean for spread in spreads]
                plot.errorbar(xs, values, bars, color=color, marker="o", markersize=4, linewidth=1.5, capsize=3)
            for size in variant.diverged:
                plot.plot([size], [0.03], "x", color=color, transform=plot.get_xaxis_transform(), clip_on=False)
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_locator(MaxNLocator(1))
        plot.set_xticks(sizes, [f"{size:,}" for size in sizes])
        plot.xaxis.set_minor_locator(NullLocator())
        plot.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
        plot.margins(y=0.12)
        _label(plot, scheme, "global batch size", metric)

    return themed_plot(draw, width, 300, _MARGINS)


def worker_counts(groups: Sequence[Group]) -> set[int]:
    """Return the numbers of workers that `over_workers` shows: trainings that changed their number are left out."""
    return {count for _, count, _ in _timed(groups)}


def over_workers(groups: Sequence[Group], colors: dict[int, str], width: int) -> Plot:
    """Draw training samples per second by number of workers, and the line of the baseline's efficiency."""
    timed = [(count, rate, colors[group.number]) for group, count, rate in _timed(groups)]
    workers = sorted(worker_counts(groups))

    def draw(plot: Axes, scheme: Colors) -> None:
        for count, rate, color in timed:
            plot.plot([count], [rate], "o", color=color, markersize=6)
        fewest = max(rate for count, rate, _ in timed if count == workers[0])
        counts = np.geomspace(workers[0], workers[-1], 50)  # a line of constant efficiency is curved on a log axis
        plot.plot(counts, fewest * counts / workers[0], "--", color=scheme.text, linewidth=0.9)
        plot.set_xscale("log", base=2)
        plot.set_xticks(workers, [str(count) for count in workers])
        plot.xaxis.set_minor_locator(NullLocator())
        plot.set_ylim(bottom=0)
        _label(plot, scheme, "workers", "images/s")

    return themed_plot(draw, width, 280, _MARGINS)


def _timed(groups: Sequence[Group]) -> list[tuple[Group, int, float]]:
    """Return the groups with one number of workers and a rate, together with both values."""
    rates = [(group, group.first.workers, group.spread(lambda facts: facts.images_per_second)) for group in groups]
    return [(group, workers, rate.mean) for group, workers, rate in rates if workers and rate]


def _variant(groups: Sequence[Group], label: str, metric: str) -> BatchSizeSeries:
    of_size: dict[int, list[Group]] = {}
    for group in groups:
        if (size := group.first.global_batch_size) is not None:
            of_size.setdefault(size, []).append(group)
    best = {size: best_group(of_size[size], metric) for size in sorted(of_size)}
    points = tuple((size, group.score) for size, group in best.items() if group and group.score)
    without = [size for size, group in best.items() if group is None]
    diverged = tuple(size for size in without if any(group.diverged for group in of_size[size]))
    return BatchSizeSeries(label, points, diverged)


def _points(run: ComparedRun, name: str, axis: Axis) -> list[tuple[float, float]]:
    xs, ys = run.history.get(axis.column, []), run.history.get(name, [])
    factor = float(run.settings.get("global_batch_size", "nan")) if axis.per_sample else 1.0
    points = [(x * factor, y) for x, y in zip(xs, ys, strict=False) if x is not None and y is not None]
    return points if all(math.isfinite(x) for x, _ in points) else []


def _limit(plot: Axes, series: Sequence[Sequence[float]], name: str) -> None:
    """Limit the range of losses: one that explodes would compress all others."""
    if is_lower_better(name):
        highest = max(values[0] for values in series)
        lowest = min(min(values) for values in series)
        plot.set_ylim(lowest - 0.04 * (highest - lowest), highest + 0.08 * (highest - lowest) + 1e-9)


def _label(plot: Axes, scheme: Colors, x: str, y: str) -> None:
    plot.set_xlabel(x, color=scheme.text, fontsize=_FONT)
    plot.set_ylabel(y, color=scheme.text, fontsize=_FONT)
    plot.grid(alpha=0.25, color=scheme.text, linewidth=0.5)
