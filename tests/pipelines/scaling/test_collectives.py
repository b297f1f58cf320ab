"""One collective among many workers, against numbers computed by hand."""

import math

import pytest

from pipelines.scaling.measurements import CollectiveName
from pipelines.scaling.step import Topology, Wire, collective_seconds, expected_maximum, ring_seconds

WIRE = Wire(operation_seconds=0.005, hop_seconds=0.001, bytes_per_second=1e6)
COLLECTIVES: tuple[CollectiveName, ...] = ("allreduce", "alltoall", "allgather")


@pytest.mark.parametrize(
    ("collective", "workers", "wire", "expected"),
    [
        # 2 * 3 hops of 1 ms, and 2 * 3 / 4 of 1 MB at 1 MB/s.
        ("allreduce", 4, WIRE, 0.005 + 0.006 + 1.5),
        # 3 hops, 3 / 4 of 1 MB.
        ("alltoall", 4, WIRE, 0.005 + 0.003 + 0.75),
        ("allgather", 4, WIRE, 0.005 + 0.003 + 0.75),
        # Without latency the bytes have a limit.
        ("allreduce", 1 << 20, Wire(0.0, 0.0, 1e6), 2.0),
        ("allreduce", 1024, Wire(0.0, 0.0, math.inf), 0.0),
    ],
)
def test_a_ring_by_hand(collective: CollectiveName, workers: int, wire: Wire, expected: float) -> None:
    assert ring_seconds(collective, 1e6, workers, wire) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_workers_never_shorten_an_operation(collective: CollectiveName) -> None:
    seconds = [ring_seconds(collective, 3e6, workers, WIRE) for workers in range(1, 200)]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0


@pytest.mark.parametrize(
    ("collective", "workers", "expected"),
    [
        # 8 workers are 2 hosts: a ring of 4 inside, a ring of 2 between.
        ("allreduce", 8, (6 * 0.0001 + 1.5 * 0.01) + (0.005 + 2 * 0.001 + 1.0)),
        # Each of 4 workers has 4 / 8 of 1 MB for the other host, over one link; 4 messages to wait for.
        ("alltoall", 8, (3 * 0.0001 + 0.75 * 0.01) + (0.005 + 4 * 0.001 + 2.0)),
        # On one host, the link between hosts has nothing to do.
        ("allreduce", 4, 6 * 0.0001 + 1.5 * 0.01),
        ("allreduce", 1, 0.0),
        ("allreduce", 3, 4 * 0.0001 + 4 / 3 * 0.01),
    ],
)
def test_hosts_with_several_workers_by_hand(collective: CollectiveName, workers: int, expected: float) -> None:
    topology = Topology(dict.fromkeys(COLLECTIVES, WIRE), dict.fromkeys(COLLECTIVES, Wire(0.0, 0.0001, 1e8)), 4)
    assert collective_seconds(collective, 1e6, workers, topology) == pytest.approx(expected)


@pytest.mark.parametrize("workers", [8, 64, 1024])
def test_a_fast_link_inside_never_makes_it_slower_than_one_worker_a_host(workers: int) -> None:
    wires, inside = dict.fromkeys(COLLECTIVES, WIRE), Wire(0.0, 1e-6, 1e10)
    flat, fast = Topology(wires), Topology(wires, {"allreduce": inside}, 8)
    assert collective_seconds("allreduce", 1e6, workers, fast) < collective_seconds("allreduce", 1e6, workers, flat)


@pytest.mark.parametrize(
    ("workers", "expected"),
    # One: 0. Two: 1 / sqrt(pi). Three: 3 / (2 sqrt(pi)). Four and ten: tables of normal order statistics.
    [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (4, 1.02938), (10, 1.53875)],
)
def test_the_mean_of_the_largest_normal_number(workers: int, expected: float) -> None:
    assert expected_maximum(workers) == pytest.approx(expected, abs=1e-4)


def test_the_largest_of_a_thousand_is_finite_and_grows() -> None:
    values = [expected_maximum(2**power) for power in range(11)]
    assert (values == sorted(values), 3.2 < values[-1] < 3.3) == (True, True)
