"""The speed of collectives on a link, estimated from measured links."""

from collections.abc import Mapping
from dataclasses import replace

from pipelines.scaling.fit import FittedLink
from pipelines.scaling.measurements import CollectiveName
from pipelines.scaling.named_link import NamedLink
from pipelines.scaling.step import Wire, Wires

_COLLECTIVES: tuple[CollectiveName, ...] = ("allreduce", "alltoall", "allgather")


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
    for collective in _COLLECTIVES:
        known = [each for each in limited or free if collective in each.wires]
        if not known:
            found[collective] = Wire(0.0, _latency(link, limited or free), link.bytes_per_second)
            continue
        nearest = min(known, key=lambda each: _distance(each, link))
        wire = nearest.wires[collective]
        reached = wire.bytes_per_second / nearest.nominal if nearest.nominal else 1.0
        most = [each.wires[collective].bytes_per_second for each in free if collective in each.wires]
        latency = _latency(link, known)
        found[collective] = replace(
            wire,
            hop_seconds=latency + max(0.0, wire.hop_seconds - nearest.latency_seconds),
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
