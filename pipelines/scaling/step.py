"""The seconds of one training step: computing, the codec, and the communication that computing does not hide.

The seconds of one collective operation follow from the number of workers, and from latency, speed and bytes.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

from pipelines.scaling.measurements import CollectiveName

_PROCESSOR, _LINK = 0, 1


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


@lru_cache(maxsize=4096)
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


@dataclass(frozen=True)
class CodecCosts:
    """The costs of one exchange of all gradients by a codec."""

    name: str
    messages: tuple[tuple[CollectiveName, float], ...]
    """Collective and bytes, as in `measurements.CollectivePoint`; empty: all gradients are sent dense."""
    dense_bytes: float
    encode_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Worker:
    """The computing of one worker."""

    fixed_seconds: float
    """Seconds of a step that do not depend on its batch."""
    seconds_per_image: float
    straggler_deviation: float
    """Standard deviation of a step's computing time, as a fraction of its mean."""
    gradients: tuple[tuple[float, float], ...]
    """Bytes of each gradient and the fraction of computing at which it is ready, in the order of readiness."""


RESOURCES = ("compute", "link", "latency", "codec", "stragglers")
"""The resources that can limit a step.

These are computing, bytes over a link, messages that wait for each other, encoding and decoding, and waiting for the
slowest worker.
"""


def compute_seconds(worker: Worker, batch_size: float) -> float:
    """Return the mean computing time of one worker's step, in seconds."""
    return worker.fixed_seconds + worker.seconds_per_image * batch_size


def step_seconds(
    worker: Worker, codec: CodecCosts, topology: Topology, workers: int, batch_size: float, bucket_mib: float | None
) -> float:
    """Return the seconds of a step of all workers.

        computing = (fixed + per image * batch) (1 + deviation * expected largest of N normal numbers)
        step      = when the last bucket is decoded, and the rest of computing after it (the update)

    Gradients fill buckets from the last layer to the first, as in `GradientExchange`, or one bucket. The processor
    that computes also encodes a bucket when its last gradient is ready. So only waiting for the link hides encoding and
    decoding, and they hide nothing. Only the link works in parallel with the processor, one operation at a time. Each
    takes first what is ready first. One worker sends nothing, but its codec encodes and decodes.

    Args:
        worker: Computing of each worker.
        codec: Costs of its exchange.
        topology: Location of the workers.
        workers: N.
        batch_size: Images of a worker in a step.
        bucket_mib: The value of `exchange.bucket_mib`.
    """
    computing = compute_seconds(worker, batch_size) * (1 + worker.straggler_deviation * expected_maximum(workers))
    buckets = make_buckets(worker.gradients, bucket_mib)
    total = sum(size for size, _ in buckets)
    chains = [_chain(codec, topology, workers, size / total) for size, _ in buckets]
    ready = [fraction * computing for _, fraction in buckets]
    if codec.messages and codec.dense_bytes:
        seconds = collective_seconds("allreduce", codec.dense_bytes, workers, topology)
        chains.append([(_LINK, seconds)])
        ready.append(ready[-1])
    return _end_of_exchange(ready, chains) + computing - ready[-1]


def make_buckets(gradients: Sequence[tuple[float, float]], bucket_mib: float | None) -> list[tuple[float, float]]:
    """Return the bytes of each bucket, and the fraction of computing at which its last gradient is ready.

    A gradient that is larger than a bucket has its own bucket.
    """
    limit = math.inf if bucket_mib is None else bucket_mib * 2**20
    buckets: list[tuple[float, float]] = []
    for size, ready in gradients:
        if buckets and buckets[-1][0] + size <= limit:
            buckets[-1] = (buckets[-1][0] + size, ready)
        else:
            buckets.append((size, ready))
    return buckets


def binding_resource(
    worker: Worker, codec: CodecCosts, topology: Topology, workers: int, batch_size: float, bucket_mib: float | None
) -> str:
    """Return the limiting one of `RESOURCES`: without its cost the step would be shortest."""
    free = {
        "compute": (replace(worker, fixed_seconds=0.0, seconds_per_image=0.0), codec, topology),
        "link": (worker, codec, _with_wires(topology, bytes_per_second=math.inf)),
        "latency": (worker, codec, _with_wires(topology, operation_seconds=0.0, hop_seconds=0.0)),
        "codec": (worker, replace(codec, encode_seconds=0.0, decode_seconds=0.0), topology),
        "stragglers": (replace(worker, straggler_deviation=0.0), codec, topology),
    }
    seconds = {name: step_seconds(*parts, workers, batch_size, bucket_mib) for name, parts in free.items()}
    return min(RESOURCES, key=lambda name: seconds[name])


def _with_wires(topology: Topology, **changes: float) -> Topology:
    def changed(wires: Mapping[CollectiveName, Wire]) -> Mapping[CollectiveName, Wire]:
        return {name: replace(wire, **changes) for name, wire in wires.items()}

    inside = None if topology.inside is None else changed(topology.inside)
    return replace(topology, between=changed(topology.between), inside=inside)


def _chain(codec: CodecCosts, topology: Topology, workers: int, share: float) -> list[tuple[int, float]]:
    """Return the operations for one bucket in order: the resource, and its seconds.

    Args:
        codec: Costs of all buckets together.
        topology: Location of the workers.
        workers: Number of workers.
        share: Fraction of all bytes that the bucket contains.
    """
    messages = codec.messages or (("allreduce", codec.dense_bytes),)
    parts = [(_PROCESSOR, codec.encode_seconds * share)]
    for collective, size in messages:
        seconds = collective_seconds(collective, size * share, workers, topology)
        parts += [(_LINK, seconds), (_PROCESSOR, codec.decode_seconds * share / len(messages))]
    return parts


def _end_of_exchange(ready: Sequence[float], chains: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Return when all chains have ended; processor and link each run one operation at a time, in order of arrival.

    Args:
        ready: Time at which each bucket's gradients would be ready if the processor only computed.
        chains: Operations for each bucket after that.
    """
    free = [0.0, 0.0]
    # Computing is also a chain: a piece for each bucket, then the bucket's operations.
    order = count(1)
    waiting: list[tuple[float, int, int, int]] = [(0.0, 0, 0, -1)]  # ready, order, bucket, part; -1: computing
    end = 0.0
    while waiting:
        at, _, bucket, part = heapq.heappop(waiting)
        if part < 0:
            resource, seconds = _PROCESSOR, ready[bucket] - (ready[bucket - 1] if bucket else 0.0)
        else:
            resource, seconds = chains[bucket][part]
        free[resource] = ended = max(at, free[resource]) + seconds
        end = max(end, ended)
        if part + 1 < len(chains[bucket]):
            heapq.heappush(waiting, (ended, next(order), bucket, part + 1))
        if part < 0 and bucket + 1 < len(chains):
            heapq.heappush(waiting, (ended, next(order), bucket + 1, -1))
    return end
