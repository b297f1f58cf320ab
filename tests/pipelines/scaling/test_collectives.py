"""One collective among many workers, against numbers computed by hand."""

import math

import pytest

from pipelines.scaling.collectives import Topology, Wire, collective_seconds, expected_maximum, ring_seconds
from pipelines.scaling.measurements import CollectiveName

WIRE = Wire(operation_seconds=0.005, hop_seconds=0.001, bytes_per_second=1e6)
COLLECTIVES: tuple[CollectiveName, ...] = ("allreduce", "alltoall", "allgather")


def test_a_ring_by_hand() -> None:
    # 2 * 3 hops of 1 ms, and 2 * 3 / 4 of 1 MB at 1 MB/s.
    assert ring_seconds("allreduce", 1e6, 4, WIRE) == pytest.approx(0.005 + 0.006 + 1.5)
    # 3 hops, 3 / 4 of 1 MB.
    for collective in ("alltoall", "allgather"):
        assert ring_seconds(collective, 1e6, 4, WIRE) == pytest.approx(0.005 + 0.003 + 0.75)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_workers_never_shorten_an_operation(collective: CollectiveName) -> None:
    seconds = [ring_seconds(collective, 3e6, workers, WIRE) for workers in range(1, 200)]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0


def test_without_latency_the_bytes_have_a_limit() -> None:
    wire = Wire(0.0, 0.0, 1e6)
    assert ring_seconds("allreduce", 1e6, 1 << 20, wire) == pytest.approx(2.0, rel=1e-5)
    assert ring_seconds("allreduce", 1e6, 1024, Wire(0.0, 0.0, math.inf)) == 0


def test_hosts_with_several_workers_by_hand() -> None:
    inside = Wire(0.0, 0.0001, 1e8)
    topology = Topology(dict.fromkeys(COLLECTIVES, WIRE), dict.fromkeys(COLLECTIVES, inside), 4)
    # 8 workers are 2 hosts: a ring of 4 inside, a ring of 2 between.
    within, between = 6 * 0.0001 + 1.5 * 0.01, 0.005 + 2 * 0.001 + 1.0
    assert collective_seconds("allreduce", 1e6, 8, topology) == pytest.approx(within + between)
    # Each of 4 workers has 4 / 8 of 1 MB for the other host, over one link; 4 messages to wait for.
    within, between = 3 * 0.0001 + 0.75 * 0.01, 0.005 + 4 * 0.001 + 2.0
    assert collective_seconds("alltoall", 1e6, 8, topology) == pytest.approx(within + between)
    # On one host, the link between hosts has nothing to do.
    assert collective_seconds("allreduce", 1e6, 4, topology) == pytest.approx(6 * 0.0001 + 1.5 * 0.01)
    assert collective_seconds("allreduce", 1e6, 1, topology) == 0
    assert collective_seconds("allreduce", 1e6, 3, topology) == pytest.approx(4 * 0.0001 + 4 / 3 * 0.01)


def test_a_fast_link_inside_never_makes_it_slower_than_one_worker_a_host() -> None:
    inside = Wire(0.0, 1e-6, 1e10)
    wires = dict.fromkeys(COLLECTIVES, WIRE)
    for workers in (8, 64, 1024):
        flat = collective_seconds("allreduce", 1e6, workers, Topology(wires))
        assert collective_seconds("allreduce", 1e6, workers, Topology(wires, {"allreduce": inside}, 8)) < flat


@pytest.mark.parametrize(
    ("workers", "expected"),
    # One: 0. Two: 1 / sqrt(pi). Three: 3 / (2 sqrt(pi)). Four and ten: tables of normal order statistics.
    [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (4, 1.02938), (10, 1.53875)],
)
def test_the_mean_of_the_largest_normal_number(workers: int, expected: float) -> None:
    assert expected_maximum(workers) == pytest.approx(expected, abs=1e-4)


def test_the_largest_of_a_thousand_is_finite_and_grows() -> None:
    values = [expected_maximum(2**power) for power in range(11)]
    assert values == sorted(values)
    assert 3.2 < values[-1] < 3.3
