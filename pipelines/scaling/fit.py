"""The parameters of the model, fitted to measurements by least squares, and many times again for intervals.

The speed of collectives on links that were not measured is estimated from measured ones.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from pipelines.scaling.measurements import (
    CodecMeasurement,
    CollectiveName,
    CollectivePoint,
    ComputePoint,
    LinkMeasurement,
    Measurements,
)
from pipelines.scaling.named_link import NamedLink
from pipelines.scaling.step import CodecCosts, Wire, Wires, Worker, hops, volume

_UNSEEN = 0.05
"""Relative error of a measured time that its repeats do not show, because equal repeats are not exact."""
_Point = TypeVar("_Point", ComputePoint, LinkMeasurement, CollectivePoint, CodecMeasurement)


@dataclass(frozen=True)
class FittedLink:
    """A measured link."""

    nominal: float | None
    """Bytes per second; None: no limit."""
    latency_seconds: float
    wires: dict[CollectiveName, Wire]
    """Wires by collective, for the collectives that were measured on this link."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of the model."""

    worker: Worker
    links: dict[str, FittedLink]
    codecs: dict[str, CodecCosts]


def fit(measurements: Measurements) -> Parameters:
    """Fit all parameters; each point of the measurements is the median of its repeats.

    Raises:
        ValueError: Computing does not take longer for more images.
    """
    fixed, per_image = _fit_compute(measurements.compute)
    gradients = tuple((float(gradient.bytes), gradient.ready) for gradient in measurements.gradients)
    return Parameters(
        Worker(fixed, per_image, measurements.straggler_deviation, gradients),
        {link.name: _fit_link(link, measurements.collectives) for link in measurements.links},
        {
            codec.name: CodecCosts(
                codec.name,
                tuple((message.collective, float(message.bytes)) for message in codec.messages),
                float(codec.dense_bytes),
                statistics.median(codec.encode_seconds),
                statistics.median(codec.decode_seconds),
            )
            for codec in measurements.codecs
        },
    )


def resampled(measurements: Measurements, draws: int, seed: int = 0) -> list[Parameters] | None:
    """Fit again to repeats drawn from the measured ones with replacement: a bootstrap.

    The predictions of these fits vary like those of repeated measurements. They do not include the error of the model
    itself.

    Args:
        measurements: Points with several repeats each.
        draws: Number of fits.
        seed: Seed of the draws.

    Returns:
        None if no step and no operation was measured more than once.
    """
    repeats = [point.seconds for point in measurements.compute] + [point.seconds for point in measurements.collectives]
    if max(map(len, repeats)) < 2:
        return None
    random = np.random.default_rng(seed)
    fits = []
    for _ in range(draws):
        drawn = measurements.model_copy(
            update={
                "compute": tuple(_drawn(point, random, "seconds") for point in measurements.compute),
                "links": tuple(_drawn(link, random, "latency_seconds") for link in measurements.links),
                "collectives": tuple(_drawn(point, random, "seconds") for point in measurements.collectives),
                "codecs": tuple(
                    _drawn(codec, random, "encode_seconds", "decode_seconds") for codec in measurements.codecs
                ),
            }
        )
        try:
            fits.append(fit(drawn))
        except ValueError:  # with points near each other, the larger batch may be faster in a draw
            continue
    return fits or None


def least_squares(
    columns: NDArray[np.float64], seconds: NDArray[np.float64], spreads: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return non-negative coefficients of the columns that minimise the errors relative to the spreads.

        minimise sum over points of ((columns @ coefficients - seconds) / spread)^2, coefficients >= 0

    The result is exact for few columns: the best of all subsets of columns with non-negative coefficients.

    Args:
        columns: `(points, coefficients)`.
        seconds: `(points,)`.
        spreads: Positive spread of each time, `(points,)`.
    """
    scaled, wanted = columns / spreads[:, None], seconds / spreads
    best, best_error = np.zeros(columns.shape[1]), np.inf
    for subset in range(1, 1 << columns.shape[1]):
        chosen = [index for index in range(columns.shape[1]) if subset >> index & 1]
        # Columns differ by orders of magnitude (bytes, operations): without scaling each to 1, small ones would vanish.
        sizes = np.abs(scaled[:, chosen]).max(axis=0)
        if len(chosen) > len(seconds) or not sizes.all():
            continue
        found = np.linalg.lstsq(scaled[:, chosen] / sizes, wanted, rcond=None)[0] / sizes
        error = float(np.sum((scaled[:, chosen] @ found - wanted) ** 2))
        # A further coefficient must reduce the error.
        if (found >= 0).all() and error < best_error - 1e-9:
            best, best_error = np.zeros(columns.shape[1]), error
            best[chosen] = found
    return best


def _fit_compute(points: Sequence[ComputePoint]) -> tuple[float, float]:
    """Return the seconds of a step without images, and those of each image; with one batch size, the first is 0."""
    batches = np.array([point.batch_size for point in points], float)
    seconds = np.array([statistics.median(point.seconds) for point in points])
    if len(points) == 1:
        return 0.0, float(seconds[0] / batches[0])
    columns = np.stack([np.ones_like(batches), batches], 1)
    fixed, per_image = least_squares(columns, seconds, _spreads(points)).tolist()
    if per_image <= 0:
        means = ", ".join(f"{point.batch_size}: {statistics.median(point.seconds):.3g} s" for point in points)
        raise ValueError(f"a step takes no longer with more images ({means}): measure batches that lie further apart")
    return fixed, per_image


def _spreads(points: Sequence[ComputePoint] | Sequence[CollectivePoint]) -> NDArray[np.float64]:
    """Return the error of each point's median: the deviation of its repeats, and a part that no repeat shows."""
    medians = np.array([statistics.median(point.seconds) for point in points])
    deviations = np.array([float(np.std(point.seconds)) for point in points])
    return np.sqrt(deviations**2 + (_UNSEEN * medians) ** 2)


def _fit_link(link: LinkMeasurement, points: Sequence[CollectivePoint]) -> FittedLink:
    latency = statistics.median(link.latency_seconds)
    own = [point for point in points if point.link == link.name]
    wires = {
        name: _fit_wire(name, [point for point in own if point.collective == name], latency)
        for name in dict.fromkeys(point.collective for point in own)
    }
    return FittedLink(link.bytes_per_second, latency, wires)


def _fit_wire(collective: CollectiveName, points: Sequence[CollectivePoint], latency: float) -> Wire:
    """Fit operation, hop and speed.

    The time of a small operation among N ranks is operation + hops(N) alpha. One N cannot separate these two terms,
    nor can two points in total, as from two recorded trainings. Then a hop is the link's latency, and the operation
    is the rest. Bytes come first: time that they explain alone is theirs.
    """
    seconds = np.array([statistics.median(point.seconds) for point in points])
    waited = np.array([hops(collective, point.ranks) for point in points], float)
    moved = np.array([volume(collective, point.ranks) * point.bytes for point in points])
    ones, spreads = np.ones_like(seconds), _spreads(points)
    several = len({point.ranks for point in points}) > 1
    if several and len({(point.ranks, point.bytes) for point in points}) >= 3:  # as many as coefficients
        per_byte, operation, hop = least_squares(np.stack([moved, ones, waited], 1), seconds, spreads).tolist()
    else:
        per_byte, smallest = least_squares(np.stack([moved, ones], 1), seconds, spreads).tolist()
        hop = latency
        operation = max(0.0, smallest - float(waited.min()) * hop)
    return Wire(operation, hop, 1 / per_byte if per_byte > 0 else float("inf"))


def _drawn(point: _Point, random: np.random.Generator, *names: str) -> _Point:
    def again(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[index] for index in random.integers(0, len(values), len(values)))

    return point.model_copy(update={name: again(getattr(point, name)) for name in names})


def wires_on(link: NamedLink, measured: Mapping[str, FittedLink]) -> Wires:
    """Return the wire of each collective on a link, estimated from the measured link with the nearest speed.

        beta      = nominal speed * the fraction that the collective reaches there, at most its speed on the link
                    without a limit
        alpha     = the link's latency + max(0, alpha - latency) there
        operation = operation there

    A collective without any measurement reaches the whole speed.

    Args:
        link: The link.
        measured: Links by name; may be empty.

    Raises:
        ValueError: The latency is not known.
    """
    found: dict[CollectiveName, Wire] = {}
    limited = [each for each in measured.values() if each.nominal is not None]
    free = [each for each in measured.values() if each.nominal is None]
    for collective in get_args(CollectiveName):
        known = [each for each in limited or free if collective in each.wires]
        if not known:
            found[collective] = Wire(0.0, _latency(link, limited or free), link.bytes_per_second)
            continue
        nearest = min(known, key=lambda each: _distance(each, link))
        wire = nearest.wires[collective]
        reached = wire.bytes_per_second / nearest.nominal if nearest.nominal else 1.0
        most = [each.wires[collective].bytes_per_second for each in free if collective in each.wires]
        found[collective] = replace(
            wire,
            hop_seconds=_latency(link, known) + max(0.0, wire.hop_seconds - nearest.latency_seconds),
            bytes_per_second=min([link.bytes_per_second * min(1.0, reached), *most]),
        )
    return found


def _latency(link: NamedLink, known: list[FittedLink]) -> float:
    if link.latency_seconds is not None:
        return link.latency_seconds
    known = [each for each in known if each.latency_seconds]
    if not known:
        raise ValueError("the link's latency is not known, as no link was measured: say it too, as in 1Gbit/s,50us")
    return min(known, key=lambda each: _distance(each, link)).latency_seconds


def _distance(measured: FittedLink, link: NamedLink) -> float:
    if measured.nominal is None:
        return 0.0
    ratio = measured.nominal / link.bytes_per_second
    return max(ratio, 1 / ratio)
