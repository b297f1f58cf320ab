"""The charts of a comparison: data for the page's script, and pictures for readers without scripts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from pipelines.comparison.groups import (
    DatasetGroups,
    Group,
    Spread,
    best_group,
    labels_of,
    rank,
    readable,
    sortable,
    word_of,
)
from pipelines.comparison.run import PAYLOAD, SECONDS, STEP, ComparedRun
from pipelines.comparison.tables import importance_of
from pipelines.dataset.report.figures import Colors, picture
from pipelines.dataset.report.tables import shorten
from pipelines.tracking.metrics import is_lower_better

_PALETTE = ("#3b7dd8", "#e07b1a", "#2f9e62", "#d24a4a", "#8e63c9", "#1499a6", "#c2559b", "#94832f")
"""Colours that are easy to distinguish on white and on black."""
Stroke = Literal["solid", "dashed", "dotted"]
"""Names of CSS and matplotlib. A hidden line is seen through the gaps of the one above it."""
_MOST_POINTS = 4_000
"""Points of the same chart of all datasets, so that the page stays below 6 MB."""
WIDTH, HEIGHT = 344, 258
"""Size of a picture, which fits a phone, in CSS pixels."""
_WIDE_RANGE = 20
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_SETTINGS, _VALUES, _LONG_VALUE = 7, 8, 12
"""Parallel coordinates show at most these settings, values of a setting, and characters of a value."""
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


class Style(NamedTuple):
    """How the lines of a group are drawn."""

    color: str
    stroke: Stroke


STYLES = tuple(islice(map(Style, cycle(_PALETTE), cycle(get_args(Stroke))), 24))
"""Styles of the best groups: each pair of colour and stroke occurs once, and neighbours differ in both."""
GREY = Style("#8d96a3", "solid")


@dataclass(frozen=True)
class Chart:
    """The lines of a chart, as `_line` returns them, and its axes in the words of matplotlib."""

    title: str
    lines: list[dict[str, Any]]
    x: dict[str, Any]
    y: dict[str, Any]
    notes: tuple[tuple[float, float, str], ...] = ()
    """Texts in the chart, by place."""

    @property
    def picture(self) -> str:
        """The chart for readers without scripts, as a data URI."""
        return picture(lambda plot, scheme: draw(plot, self, scheme), WIDTH, HEIGHT)


def styles_of(groups: Sequence[Group], metric: str) -> dict[int, Style]:
    """Return the style by number of the group: the best groups have their own styles, the others are grey."""
    best = sorted(groups, key=lambda group: rank(group, metric))[: len(STYLES)]
    shown = sorted(group.number for group in best)
    return {group.number: GREY for group in groups} | dict(zip(shown, STYLES, strict=False))


def curves(part: DatasetGroups, name: str, axis: Axis, styles: dict[int, Style], parts: int = 1) -> Chart | None:
    """Return one metric of every group by samples, time or bytes; None if nothing is recorded.

    A line is the mean over the seeds that ended well, its band reaches from the lowest to the highest of them. Each
    other training has a thin line of its own, with a cross if it diverged.

    Args:
        part: The groups.
        name: Name of the metric.
        axis: The horizontal axis.
        styles: Style by number of the group.
        parts: Number of datasets on the page: the more there are, the fewer epochs each chart shows.
    """
    trainings = [facts.run for group in part.groups for facts in group.members]
    every = math.ceil(sum(len(run.history.get(STEP, [])) for run in trainings) * parts / _MOST_POINTS)
    points = {run.run_id: _points(run, name, axis, every) for run in trainings}
    lines = [_line(group.number, styles[group.number], _means(group, points)) for group in part.groups]
    for group in part.groups:
        for facts in group.members:
            own = [(x, _single(y)) for x, y in points[facts.run.run_id].values() if not facts.counts]
            lines.append(_line(group.number, styles[group.number], own, width=0.8, has_cross=facts.is_diverged))
    lines = [line for line in lines if line["x"]]
    if not any(len(line["x"]) > 1 for line in lines):
        return None
    x = {**_scale([line["x"][-1] for line in lines]), "label": axis.label}
    heights = [y for line in lines for y in line["mean"]] if is_lower_better(name) else []
    title = f"{name} by {axis.label}" + f", a point for every {every} epochs" * (every > 1)
    return Chart(title, lines, x, {**_scale(heights), "label": name})


def variants_of(part: DatasetGroups, metric: str) -> list[BatchSizeSeries]:
    """Return the score by batch size, one series for each choice of the settings that do not depend on it."""
    keys = [key for key in part.differing if key not in _FOLLOWS_THE_BATCH]
    telling: dict[tuple[str | None, ...], list[Group]] = {}
    for group in part.groups:
        telling.setdefault(tuple(group.settings.get(key) for key in keys), []).append(group)
    labels = labels_of([groups[0].settings for groups in telling.values()], keys)
    variants = [_variant(groups, label, metric) for groups, label in zip(telling.values(), labels, strict=True)]
    return sorted((each for each in variants if each.points or each.diverged), key=lambda each: -len(each.points))


def over_batch(variants: Sequence[BatchSizeSeries], metric: str) -> Chart | None:
    """Return the score by global batch size, with a cross at the bottom where it diverged; None for a single size."""
    lowest = min((spread.low for variant in variants for _, spread in variant.points), default=0.0)
    lines = []
    for place, variant in enumerate(variants):
        number, style = place + 1, variant_style(place)
        lines.append(_line(number, style, variant.points, "lines+markers"))
        lines += [_line(number, style, [(size, _single(lowest))], has_cross=True) for size in variant.diverged]
    if len({size for variant in variants for size, _ in variant.points}) < 2:
        return None
    sizes = sorted({x for line in lines for x in line["x"]})
    x = {"scale": "log", "ticks": sizes, "ticklabels": [f"{size:,}" for size in sizes], "label": "global batch size"}
    return Chart(f"{metric} by global batch size", lines, x, {"label": metric})


def variant_style(place: int) -> Style:
    """Return the style of a series; the series after the first ones are grey."""
    return STYLES[place] if place < len(STYLES) else GREY


def over_workers(groups: Sequence[Group], styles: dict[int, Style]) -> Chart | None:
    """Return training samples per second by number of workers, and the line of the baseline's efficiency.

    Trainings that changed their number of workers are left out. The chart is None for a single number of workers.
    """
    rates = [(group, group.first.workers, group.spread(lambda facts: facts.images_per_second)) for group in groups]
    timed = [(group, workers, rate) for group, workers, rate in rates if workers and rate]
    workers = sorted({count for _, count, _ in timed})
    if len(workers) < 2:
        return None
    lines = [_line(group.number, styles[group.number], [(count, rate)], "markers") for group, count, rate in timed]
    fewest = max(rate.mean for _, count, rate in timed if count == workers[0])
    counts = np.geomspace(workers[0], workers[-1], 50)  # a line of constant efficiency is curved on a log axis
    ideal = [(count, _single(fewest * count / workers[0])) for count in counts.tolist()]
    lines.append(_line(0, Style(GREY.color, "dashed"), ideal))
    x = {"scale": "log", "ticks": workers, "ticklabels": [str(count) for count in workers], "label": "workers"}
    return Chart("images per second by workers", lines, x, {"label": "images/s", "lim": (0, None)})


def parallel(part: DatasetGroups, metric: str, styles: dict[int, Style]) -> Chart | None:
    """Return a line per group over an axis for each of the most important settings, and one for the score.

    The values of an axis are in order and evenly spaced. The lines of one value are drawn beside each other. The chart
    is None if no setting has an importance.
    """
    keys, groups = list(importance_of(part))[:_SETTINGS], [group for group in part.groups if group.score]
    if not keys:
        return None
    columns = [[group.settings.get(key) for group in groups] for key in keys]
    columns.append([str(group.score.mean) for group in groups if group.score])
    orders = [sorted(set(column), key=sortable) for column in columns]
    lines = []
    for place, (group, values) in enumerate(zip(groups, zip(*columns, strict=True), strict=True)):
        beside = 0.5 + 0.6 * (place / len(groups) - 0.5)
        rows = [(order.index(value) + beside) / len(order) for order, value in zip(orders, values, strict=True)]
        line = _line(group.number, styles[group.number], [(x, _single(y)) for x, y in enumerate(rows)])
        lines.append(line | {"texts": [readable(value) for value in values]})
    notes = tuple(
        (x, (place + 0.5) / len(order), shorten(readable(order[place]), _LONG_VALUE))
        for x, order in enumerate(orders)
        for place in range(0, len(order), math.ceil(len(order) / _VALUES))
    )
    names = [*map(word_of, keys), metric]
    x = {"ticks": list(range(len(names))), "ticklabels": [shorten(name, 20) for name in names]}
    return Chart(f"settings and {metric}", lines, x, {"ticks": []}, notes)


def draw(plot: Axes, chart: Chart, scheme: Colors) -> None:
    """Draw a chart by matplotlib."""
    for line in chart.lines:
        xs, ys, color, mode = line["x"], line["mean"], line["color"], line["mode"]
        plot.fill_between(xs, line.get("low", ys), line.get("high", ys), color=color, alpha=0.2, linewidth=0)
        stroke, marker = line["stroke"] if "lines" in mode else "", "o" if "markers" in mode else ""
        plot.plot(xs, ys, color=color, linestyle=stroke, marker=marker, markersize=4, linewidth=line["width"])
        if line["has_cross"]:
            plot.plot(xs[-1:], ys[-1:], "x", color=color)
    # 2k for 2,000, but 0.8 for 0.8: "800m" is read as 800 metres or minutes.
    plot.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if abs(x) < 1 else EngFormatter(sep="").format_eng(x))
    plot.set(**{f"{name}{key}": value for name in "xy" for key, value in getattr(chart, name).items()})
    if "ticks" in chart.x:
        plot.minorticks_off()
    for x, y, text in chart.notes:
        box = {"facecolor": scheme.text, "linewidth": 0, "pad": 1}
        plot.text(x, y, text, color="white", bbox=box, fontsize=6, ha="center", va="center", parse_math=False)
    for axis in (plot.xaxis, plot.yaxis):
        axis.label.set(color=scheme.text, fontsize=8)
    plot.grid(alpha=0.25, color=scheme.text, linewidth=0.5)


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


def _points(run: ComparedRun, name: str, axis: Axis, every: int) -> dict[float | None, tuple[float, float]]:
    """Return the axis and the metric by step, for each `every`-th row and the last one."""
    xs, ys, steps = run.history.get(axis.column, []), run.history.get(name, []), run.history.get(STEP, [])
    factor = float(run.settings.get("global_batch_size", "nan")) if axis.per_sample else 1.0
    points = {
        step: (x * factor, y)
        for row, (step, x, y) in enumerate(zip(steps, xs, ys, strict=False), 1)
        if x is not None and y is not None and (row % every == 0 or row == len(steps))
    }
    return points if all(math.isfinite(x) for x, _ in points.values()) else {}


def _means(group: Group, points: dict[str, dict[float | None, tuple[float, float]]]) -> list[tuple[float, Spread]]:
    """Return the mean of the axis and the spread of the metric over the seeds, for each step."""
    members = {facts.run.run_id: points[facts.run.run_id] for facts in group.members}

    def at(step: float | None, place: int) -> Spread | None:
        found = {run_id: of_run[step][place] for run_id, of_run in members.items() if step in of_run}
        return group.spread(lambda facts: found.get(facts.run.run_id))

    steps = sorted({step or 0.0 for of_run in members.values() for step in of_run})
    pairs = [(at(step, 0), at(step, 1)) for step in steps]
    return [(x.mean, y) for x, y in pairs if x and y]


def _single(value: float) -> Spread:
    return Spread(value, None, 1, value, value)


def _line(
    number: int,
    style: Style,
    points: Sequence[tuple[float, Spread]],
    mode: str = "lines",
    *,
    width: float = 1.5,
    has_cross: bool = False,
) -> dict[str, Any]:
    """Return a line of a group as JSON: means, and the range and the number of seeds if there are several."""
    names = ("mean", "low", "high", "count") if any(y.count > 1 for _, y in points) else ("mean",)
    columns = {name: [_short(getattr(y, name)) for _, y in points] for name in names}
    look = {"number": number, "mode": mode, "width": width, "has_cross": has_cross, **style._asdict()}
    return {"x": [_short(x) for x, _ in points], **columns, **look}


def _scale(values: Sequence[float]) -> dict[str, str]:
    """Return a logarithmic scale if small values would not be seen on a linear one."""
    return {"scale": "log"} if values and max(values) > _WIDE_RANGE * min(values) > 0 else {}


def _short(value: float) -> float:
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short
