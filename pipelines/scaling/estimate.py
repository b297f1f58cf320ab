"""The predictions by number of workers and codec: time, efficiency and cost with intervals, and the limit.

Their lines for the terminal, CSV and plots all say that they are predictions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.machine.console import cell
from pipelines.scaling.fit import Parameters
from pipelines.scaling.step import CodecCosts, Topology, binding_resource, compute_seconds, step_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRONG, WEAK = "strong", "weak"
BUCKETS_MIB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, None)
"""Sizes of buckets that are compared to find the best one; None: one bucket."""

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


@dataclass(frozen=True)
class Job:
    """The training to predict."""

    images: int | None
    """Training images; None: time and cost of a training are not predicted."""
    epochs: int | None
    price: float | None
    """Price of one worker for an hour, in any currency."""


@dataclass(frozen=True)
class Row:
    """The prediction for one number of workers and one codec."""

    scaling: str
    workers: int
    codec: str
    batch_size: int
    """Images of one worker in a step; the largest number if they differ."""
    global_batch_size: int
    seconds: float
    """Seconds of a step."""
    low: float | None
    """The 2.5th percentile of `seconds` over the fits to resampled measurements; None: there are none."""
    high: float | None
    """The 97.5th percentile."""
    images_per_second: float
    efficiency: float
    """Images per second, divided by N times those of one worker without an exchange.

    The one worker has the whole global batch (strong scaling), or the batch of one of the N workers (weak).
    """
    binds: str
    """One of `step.RESOURCES`."""
    hours: float | None
    cost: float | None


@dataclass(frozen=True)
class FastestExchange:
    """The fastest codec and size of buckets for one number of workers."""

    codec: str
    bucket_mib: float | None
    seconds: float


Network = Callable[[Parameters], Topology]
"""A function from a fit to the location of the workers: the speed of a link is fitted too."""


def batches_of(scaling: str, batch: int, workers: int) -> tuple[int, int] | None:
    """Return the largest batch of a worker and the global batch; None if there are fewer images than workers.

    Args:
        scaling: `STRONG`: the global batch is constant; `WEAK`: the batch of each worker is.
        batch: The constant batch.
        workers: N.
    """
    if scaling == WEAK:
        return batch, batch * workers
    return (math.ceil(batch / workers), batch) if batch >= workers else None


def predict(
    parameters: Parameters,
    draws: Sequence[Parameters] | None,
    network: Network,
    scaling: str,
    batch: int,
    workers: Sequence[int],
    codecs: Sequence[str],
    bucket_mib: float | None,
    job: Job,
) -> list[Row]:
    """Return a row for each number of workers and codec.

    Args:
        parameters: The fit.
        draws: Fits to resampled measurements; None: no intervals.
        network: Location of the workers.
        scaling: `STRONG` or `WEAK`.
        batch: Number of samples of all workers (strong) or of each one (weak).
        workers: Numbers of workers; numbers above a strong batch are left out.
        codecs: Names of the codecs.
        bucket_mib: The value of `exchange.bucket_mib`.
        job: The training.
    """
    topology = network(parameters)
    drawn = [(each, network(each)) for each in draws or ()]
    alone = batch / compute_seconds(parameters.worker, batch)
    rows = []
    for count in workers:
        batches = batches_of(scaling, batch, count)
        if batches is None:
            continue
        for name in codecs:
            codec = parameters.codecs[name]
            seconds = step_seconds(parameters.worker, codec, topology, count, batches[0], bucket_mib)
            spread = [
                step_seconds(each.worker, each.codecs[name], where, count, batches[0], bucket_mib)
                for each, where in drawn
            ]
            low, high = np.percentile(spread, (2.5, 97.5)).tolist() if spread else (None, None)
            hours, cost = _training(job, batches[1], count, seconds)
            rows.append(
                Row(
                    scaling=scaling,
                    workers=count,
                    codec=name,
                    batch_size=batches[0],
                    global_batch_size=batches[1],
                    seconds=seconds,
                    low=low,
                    high=high,
                    images_per_second=batches[1] / seconds,
                    efficiency=batches[1] / seconds / (count * alone),
                    binds=binding_resource(parameters.worker, codec, topology, count, batches[0], bucket_mib),
                    hours=hours,
                    cost=cost,
                )
            )
    return rows


def fastest(
    parameters: Parameters,
    network: Network,
    scaling: str,
    batch: int,
    workers: int,
    codecs: Mapping[str, CodecCosts],
    bucket_mib: float | None,
) -> FastestExchange | None:
    """Return the fastest codec and size of buckets, from `bucket_mib` and `BUCKETS_MIB`; the first one if equal."""
    batches = batches_of(scaling, batch, workers)
    if batches is None:
        return None
    topology = network(parameters)
    choices = [
        FastestExchange(name, bucket, step_seconds(parameters.worker, codec, topology, workers, batches[0], bucket))
        for name, codec in codecs.items()
        for bucket in dict.fromkeys((bucket_mib, *BUCKETS_MIB))
    ]
    return min(choices, key=lambda choice: choice.seconds)


def _training(job: Job, global_batch: int, workers: int, seconds: float) -> tuple[float | None, float | None]:
    """Return hours and cost of a training; its epochs leave out images that do not fill a global batch."""
    if job.images is None or job.epochs is None or job.images < global_batch:
        return None, None
    hours = job.epochs * (job.images // global_batch) * seconds / 3600
    return hours, None if job.price is None else hours * workers * job.price


def csv_of(rows: Sequence[Row]) -> str:
    """Return all rows with a header; the columns of predictions begin with `predicted_`."""
    import pandas

    table = pandas.DataFrame([{name: cell(value) for name, value in asdict(row).items()} for row in rows]).rename(
        columns=_UNITS
    )
    return str(table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


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
        right.set(xscale="log", ylabel="predicted efficiency, %", ylim=(0, None))
        ticks = sorted({row.workers for row in rows if row.scaling == kind})
        for axes in (left, right):
            axes.set(xlabel="workers", title=f"{kind} scaling, predicted")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        left.legend(fontsize=8)
    figure.suptitle(f"Predicted, not measured: {title}", fontsize=11)
    return figure
