"""The seconds of one training step: computing, the codec, and the communication that computing does not hide."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pipelines.scaling.collectives import Topology, Wire, collective_seconds, expected_maximum
from pipelines.scaling.measurements import CollectiveName

_MIB = 1 << 20
_PROCESSOR, _LINK = 0, 1


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
    computing = compute_seconds(worker, batch_size) * (1 + worker.straggler_deviation * expected(workers))
    buckets = make_buckets(worker.gradients, bucket_mib)
    total = sum(size for size, _ in buckets)
    chains = [_chain(codec, topology, workers, size / total) for size, _ in buckets]
    ready = [fraction * computing for _, fraction in buckets]
    if codec.messages and codec.dense_bytes:
        seconds = collective_seconds("allreduce", codec.dense_bytes, workers, topology)
        chains.append([(_LINK, seconds)])
        ready.append(ready[-1])
    return _end_of_exchange(ready, chains) + computing - ready[-1]


@lru_cache(maxsize=4096)
def expected(workers: int) -> float:
    """Return `expected_maximum`, computed only once for each number of workers."""
    return expected_maximum(workers)


def make_buckets(gradients: Sequence[tuple[float, float]], bucket_mib: float | None) -> list[tuple[float, float]]:
    """Return the bytes of each bucket, and the fraction of computing at which its last gradient is ready.

    A gradient that is larger than a bucket has its own bucket.
    """
    limit = math.inf if bucket_mib is None else bucket_mib * _MIB
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
        parts.append((_LINK, collective_seconds(collective, size * share, workers, topology)))
        parts.append((_PROCESSOR, codec.decode_seconds * share / len(messages)))
    return parts


def _end_of_exchange(ready: Sequence[float], chains: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Return when all chains have ended; processor and link each run one operation at a time, in order of arrival.

    Args:
        ready: Time at which each bucket's gradients would be ready if the processor only computed.
        chains: Operations for each bucket after that.
    """
    free = [0.0, 0.0]
    # Computing is also a chain: a piece for each bucket, then the bucket's operations.
    order = 0
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
            order += 1
            heapq.heappush(waiting, (ended, order, bucket, part + 1))
        if part < 0 and bucket + 1 < len(chains):
            order += 1
            heapq.heappush(waiting, (ended, order, bucket + 1, -1))
    return end
