"""The predictions by number of workers and codec: time, efficiency and cost with intervals, and the limit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.scaling.fit import Parameters
from pipelines.scaling.step import CodecCosts, Topology, binding_resource, compute_seconds, step_seconds

STRONG, WEAK = "strong", "weak"
BUCKETS_MIB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, None)
"""Sizes of buckets that are compared to find the best one; None: one bucket."""
_INTERVAL = (2.5, 97.5)


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
    """Hours of the training."""
    cost: float | None


@dataclass(frozen=True)
class FastestExchange:
    """The fastest codec and size of buckets for one number of workers."""

    workers: int
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
            low, high = np.percentile(spread, _INTERVAL).tolist() if spread else (None, None)
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
        FastestExchange(
            workers, name, bucket, step_seconds(parameters.worker, codec, topology, workers, batches[0], bucket)
        )
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
