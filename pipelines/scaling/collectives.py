"""The seconds of one collective operation by number of workers, from latency, speed and bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.scaling.measurements import CollectiveName


@dataclass(frozen=True)
class Wire:
    """One collective on one link between hosts with one worker each."""

    operation_seconds: float
    """Seconds of any operation, however small, for any number of workers: the runtime waits until all have called."""
    hop_seconds: float
    """Alpha: seconds of each message that a worker waits for."""
    bytes_per_second: float
    """Beta: bytes that a worker really sends per second; infinite if bytes take no time."""


Wires = Mapping[CollectiveName, Wire]


@dataclass(frozen=True)
class Topology:
    """The location of the workers."""

    between: Wires
    """The link between hosts."""
    inside: Wires | None = None
    """The link between workers of one host; None: each host has one worker."""
    workers_per_host: int = 1


def hops(collective: CollectiveName, workers: int) -> int:
    """Return how many messages a worker waits for in sequence: 2 (N - 1) in a ring allreduce, else N - 1."""
    return (2 if collective == "allreduce" else 1) * (workers - 1)


def volume(collective: CollectiveName, workers: int) -> float:
    """Return the bytes that a worker sends per byte of the message: 2 (N - 1) / N in a ring allreduce, else half.

    `measurements.CollectivePoint.bytes` defines the message.
    """
    return hops(collective, workers) / workers


def ring_seconds(collective: CollectiveName, size: float, workers: int, wire: Wire) -> float:
    """Return the seconds of one operation among workers with one link each; 0 for one worker.

        seconds = operation + hops(N) alpha + volume(N) bytes / beta

    Args:
        collective: Name of the collective.
        size: Bytes, as in `measurements.CollectivePoint.bytes`.
        workers: N.
        wire: The link.
    """
    if workers == 1:
        return 0.0
    moved = volume(collective, workers) * size / wire.bytes_per_second
    return wire.operation_seconds + hops(collective, workers) * wire.hop_seconds + moved


def collective_seconds(collective: CollectiveName, size: float, workers: int, topology: Topology) -> float:
    """Return the seconds of one operation among workers; the workers of a host share its link.

        H = hosts, L = workers of a host, B = bytes of the message
        allreduce: a ring of L inside each host, and a ring of H between hosts, each with all B bytes
        allgather: the same with half of the hops and bytes
        alltoall:  every worker has (N - L) / N B bytes for other hosts, and the host's link carries those of all L

    This is a bound: it assumes that the operation is arranged by hosts. A last host that is not full counts as a full
    one.
    """
    per_host = min(topology.workers_per_host, workers)
    if topology.inside is None or per_host == 1:
        return ring_seconds(collective, size, workers, topology.between[collective])
    inside = ring_seconds(collective, size, per_host, topology.inside[collective])
    hosts = math.ceil(workers / per_host)
    if hosts == 1:
        return inside
    between = topology.between[collective]
    if collective != "alltoall":
        return inside + ring_seconds(collective, size, hosts, between)
    remote = workers - per_host
    moved = per_host * remote / workers * size / between.bytes_per_second
    return inside + between.operation_seconds + remote * between.hop_seconds + moved


def expected_maximum(workers: int) -> float:
    """Return the mean of the largest of N independent standard normal numbers; 0 for one number.

        E = integral of x d(Phi(x)^N), Phi the normal distribution function

    Integration by parts: E = integral over x > 0 of (1 - Phi(x)^N), minus the integral over x < 0 of Phi(x)^N.
    """
    if workers == 1:
        return 0.0
    step, total = 0.01, 0.0
    for index in range(900):
        x = (index + 0.5) * step
        above = math.erfc(x / math.sqrt(2)) / 2
        total += -math.expm1(workers * math.log1p(-above)) - above**workers
    return total * step
