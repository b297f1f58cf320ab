"""Seconds of one training step: computing, the codec, and the communication that no computing hides."""

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
    """One exchange of all gradients by a codec."""

    name: str
    messages: tuple[tuple[CollectiveName, float], ...]
    """Collective and bytes, as of `measurements.CollectivePoint`; empty: all gradients travel dense."""
    dense_bytes: float
    encode_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Worker:
    """What one worker computes."""

    fixed_seconds: float
    """Seconds of a step that do not depend on its batch."""
    seconds_per_image: float
    straggler_deviation: float
    """Standard deviation of a step's computing, as a part of its mean."""
    gradients: tuple[tuple[float, float], ...]
    """Bytes, and when they are ready as a part of the computing; in that order."""


RESOURCES = ("compute", "link", "latency", "codec", "stragglers")
"""What can bind a step: computing, bytes over a link, messages that wait for each other, encoding and decoding, and
waiting for the slowest of the workers."""


def compute_seconds(worker: Worker, batch_size: float) -> float:
    """Return the mean seconds of one worker's computing of a step."""
    return worker.fixed_seconds + worker.seconds_per_image * batch_size


def step_seconds(
    worker: Worker, codec: CodecCosts, topology: Topology, workers: int, batch_size: float, bucket_mib: float | None
) -> float:
    """Return the seconds of a step of all workers.

        computing = (fixed + per image * batch) (1 + deviation * expected largest of N normal numbers)
        step      = when the last bucket is decoded, and the rest of computing after it (the update)

    Gradients fill buckets from the last layer to the first, as `GradientExchange` does, or one bucket. A bucket is
    encoded when its last gradient is ready, by the processor that also computes: encoding and decoding hide nothing and
    are hidden by nothing but waiting for the link. Only the link works beside the processor, one operation at a time.
    Each takes what is ready first. One worker sends nothing, but its codec encodes and decodes.

    Args:
        worker: What it computes.
        codec: What its exchange costs.
        topology: Where the workers are.
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
    """Return `expected_maximum`, computed once for each number."""
    return expected_maximum(workers)


def make_buckets(gradients: Sequence[tuple[float, float]], bucket_mib: float | None) -> list[tuple[float, float]]:
    """Return the bytes of each bucket, and when its last gradient is ready.

    A gradient that is larger than a bucket is one by itself.
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
    """Return which of `RESOURCES` binds: the one without whose cost the step would be shortest."""
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
    """Return what is done for one bucket, in order: by whom, and for how many seconds.

    Args:
        codec: What all buckets together cost.
        topology: Where the workers are.
        workers: Their number.
        share: Part of the bucket in all bytes.
    """
    messages = codec.messages or (("allreduce", codec.dense_bytes),)
    parts = [(_PROCESSOR, codec.encode_seconds * share)]
    for collective, size in messages:
        parts.append((_LINK, collective_seconds(collective, size * share, workers, topology)))
        parts.append((_PROCESSOR, codec.decode_seconds * share / len(messages)))
    return parts


def _end_of_exchange(ready: Sequence[float], chains: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Return when all chains have ended; processor and link each do one thing at a time, first come, first served.

    Args:
        ready: When each bucket's gradients would be ready if the processor did nothing but compute.
        chains: What is done for each bucket from then on.
    """
    free = [0.0, 0.0]
    # Computing is a chain too: a piece for each bucket, then what the bucket needs.
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
