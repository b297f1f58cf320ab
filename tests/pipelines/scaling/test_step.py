"""One step, against numbers computed by hand and what must hold for any."""

import math
from dataclasses import replace

import pytest

from pipelines.scaling.measurements import CollectiveName
from pipelines.scaling.step import (
    RESOURCES,
    CodecCosts,
    Topology,
    Wire,
    Worker,
    binding_resource,
    make_buckets,
    ring_seconds,
    step_seconds,
)

MIB, WIRE = 1 << 20, Wire(0.005, 0.001, 1e6)
COLLECTIVES: tuple[CollectiveName, ...] = ("allreduce", "alltoall", "allgather")
SLOW = Topology(dict.fromkeys(COLLECTIVES, WIRE))
FREE = Topology(dict.fromkeys(COLLECTIVES, Wire(0.0, 0.0, math.inf)))
AT_THE_END = Worker(0.1, 0.05, 0.0, ((4e6, 1.0),))
SPREAD = Worker(0.1, 0.05, 0.0, ((1e6, 0.4), (1e6, 0.6), (2e6, 0.9)))
DENSE = CodecCosts("none", (), 4e6, 0.0, 0.0)
SMALL = CodecCosts("small", (("alltoall", 4e4), ("allgather", 4e4)), 0.0, 0.06, 0.02)


def link(bytes_per_second: float) -> Topology:
    return Topology(dict.fromkeys(COLLECTIVES, Wire(0.0, 0.0, bytes_per_second)))


@pytest.mark.parametrize(
    ("worker", "codec", "topology", "workers", "bucket_mib", "expected"),
    [
        # One worker does not communicate.
        (SPREAD, DENSE, SLOW, 1, None, 0.5),
        (SPREAD, DENSE, SLOW, 1, 1.0, 0.5),
        (SPREAD, SMALL, SLOW, 1, None, 0.5 + 0.08),
        # Without overlap everything adds up: 0.5 s of computing; 0.005 + 2 * 3 * 0.001 + 1.5 * 4 s.
        (AT_THE_END, DENSE, SLOW, 4, None, 0.5 + 6.011),
        # Encode, 3 hops and 3 / 4 of 40 kB, half of the decoding, the same again.
        (AT_THE_END, SMALL, SLOW, 4, None, 0.5 + 0.06 + 2 * (0.005 + 0.003 + 0.75 * 0.04 + 0.01)),
        # A bucket travels while later ones are computed. Two workers: 0.1, 0.1 and 0.2 s on the link; ready at 0.2,
        # 0.3 and 0.45 of 0.5 s; the update takes 0.05.
        (SPREAD, DENSE, link(1e7), 2, 0.5, 0.45 + 0.2 + 0.05),
        # One bucket: all of it after the last gradient.
        (SPREAD, DENSE, link(1e7), 2, None, 0.45 + 0.4 + 0.05),
        # A link that is busy from the first bucket on: 0.2 + (0.1 + 0.1 + 0.2) * 10.
        (SPREAD, DENSE, link(1e6), 2, 0.5, 0.2 + 4.0 + 0.05),
        # Encoding takes the processor from computing: 0.08 s more than computing, however the buckets are.
        *((SPREAD, SMALL, FREE, 8, bucket, 0.5 + 0.08) for bucket in (0.5, 1.0, None)),
        # An infinitely fast link leaves computing, with any number of workers.
        *((SPREAD, DENSE, FREE, workers, 8.0, 0.5) for workers in (2, 64, 1024)),
    ],
)
def test_a_step_by_hand(
    worker: Worker, codec: CodecCosts, topology: Topology, workers: int, bucket_mib: float | None, expected: float
) -> None:
    assert step_seconds(worker, codec, topology, workers, 8, bucket_mib) == pytest.approx(expected)


def test_the_slowest_of_two_workers_by_hand() -> None:
    uneven, expected = replace(AT_THE_END, straggler_deviation=0.1), 0.5 * (1 + 0.1 / math.sqrt(math.pi))
    assert step_seconds(uneven, DENSE, FREE, 2, 8, None) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("codec", [DENSE, SMALL])
@pytest.mark.parametrize("bucket_mib", [1.0, None])
def test_a_step_never_gets_shorter_by_more_workers_of_the_same_batch(
    codec: CodecCosts, bucket_mib: float | None
) -> None:
    uneven = replace(SPREAD, straggler_deviation=0.05)
    seconds = [step_seconds(uneven, codec, SLOW, 2**power, 8, bucket_mib) for power in range(11)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("workers", [2, 8])
def test_the_faster_codec_changes_where_the_formula_says(workers: int) -> None:
    """Dense: 4 MB; the codec: 0.08 s and 40 kB; both 2 (N - 1) / N times, so equal at 3.96 MB / beta = 0.08 s."""
    crossover = 2 * (workers - 1) / workers * (4e6 - 4e4) / 0.08
    for factor, dense_wins in ((0.99, False), (1.01, True)):
        wires = link(factor * crossover)
        dense, small = (step_seconds(AT_THE_END, codec, wires, workers, 8, None) for codec in (DENSE, SMALL))
        assert (dense < small) == dense_wins


def test_dense_gradients_beside_a_codec_are_one_more_operation() -> None:
    without, with_dense = (
        step_seconds(AT_THE_END, codec, SLOW, 4, 8, None) for codec in (SMALL, replace(SMALL, dense_bytes=1e4))
    )
    # It travels while the bucket is encoded: what is left of it is hidden by nothing else.
    assert 0 <= with_dense - without <= ring_seconds("allreduce", 1e4, 4, WIRE)


def test_buckets_are_those_of_the_exchange() -> None:
    gradients = [(3.0 * MIB, 0.1), (6.0 * MIB, 0.2), (2.0 * MIB, 0.3), (9.0 * MIB, 0.4), (1.0 * MIB, 0.5)]
    assert (make_buckets(gradients, 8.0), make_buckets(gradients, None)) == (
        [
            (3 * MIB, 0.1),
            (8 * MIB, 0.3),
            (9 * MIB, 0.4),
            (1 * MIB, 0.5),
        ],
        [(21 * MIB, 0.5)],
    )


@pytest.mark.parametrize(
    ("worker", "codec", "wire", "bound"),
    [
        (AT_THE_END, DENSE, Wire(0.0, 0.0, 1e9), "compute"),
        (AT_THE_END, DENSE, Wire(0.0, 0.0, 1e6), "link"),
        (AT_THE_END, DENSE, Wire(0.0, 0.5, 1e9), "latency"),
        (AT_THE_END, replace(SMALL, encode_seconds=2.0), Wire(0.0, 0.0, 1e9), "codec"),
        (replace(AT_THE_END, straggler_deviation=5.0, fixed_seconds=0.0), DENSE, Wire(0.0, 0.0, 1e12), "compute"),
    ],
)
def test_what_binds(worker: Worker, codec: CodecCosts, wire: Wire, bound: str) -> None:
    assert binding_resource(worker, codec, Topology(dict.fromkeys(COLLECTIVES, wire)), 8, 8, None) == bound in RESOURCES
