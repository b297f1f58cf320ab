import pytest

from pipelines.launch.placement import devices_of_hosts, place, visible_devices


def test_ranks_are_contiguous_per_host() -> None:
    placements = place(["a", "b", "a", "b"])
    assert [placement.rank for placement in placements] == [0, 2, 1, 3]
    assert [placement.local_rank for placement in placements] == [0, 0, 1, 1]
    assert {placement.local_size for placement in placements} == {2}
    assert [placement.cross_rank for placement in placements] == [0, 1, 0, 1]
    assert {placement.cross_size for placement in placements} == {2}


def test_uneven_hosts() -> None:
    placements = place(["a", "a", "b", "a"])
    assert sorted(placement.rank for placement in placements) == [0, 1, 2, 3]
    by_rank = sorted(placements, key=lambda placement: placement.rank)
    assert [(p.host, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in by_rank] == [
        ("a", 0, 3, 0, 2),
        ("a", 1, 3, 0, 1),
        ("a", 2, 3, 0, 1),
        ("b", 0, 1, 1, 2),
    ]


def test_horovods_own_plan_agrees() -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    ours = sorted(place(["a", "b", "a", "c", "a", "b"]), key=lambda placement: placement.rank)
    theirs = get_host_assignments(parse_hosts("a:3,b:2,c:1"), 6)
    for own, other in zip(ours, theirs, strict=True):
        assert (own.host, own.rank, own.size) == (other.hostname, other.rank, other.size)
        assert (own.local_rank, own.local_size) == (other.local_rank, other.local_size)
        assert (own.cross_rank, own.cross_size) == (other.cross_rank, other.cross_size)


def test_ranks_of_a_host_see_each_others_gpus_in_the_order_of_local_ranks() -> None:
    placements = place(["a", "b", "a", "c", "d"])
    assert devices_of_hosts(placements, ["3", "0", "1", "-1", "4,5"]) == {
        "a": {"CUDA_VISIBLE_DEVICES": "3,1"},
        "b": {"CUDA_VISIBLE_DEVICES": "0"},
    }


def test_one_rank() -> None:
    (placement,) = place(["a"])
    assert placement.environment()["HOROVOD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("addresses", "visible", "expected"),
    [
        (["1"], None, "1"),
        (["1"], "", "1"),
        (["MIG-77aa", "GPU-8f2c"], None, "MIG-77aa,GPU-8f2c"),
        (["0", "1"], "2,3", "2,3"),
        (["0"], "1,2", "1"),
        (["1"], "1,2", "2"),
        (["GPU-8f2c"], "GPU-77aa,GPU-8f2c", "GPU-8f2c"),
    ],
)
def test_devices_map_through_what_the_executor_may_see(
    addresses: list[str], visible: str | None, expected: str
) -> None:
    assert visible_devices(addresses, visible) == expected


def test_a_device_that_the_executor_may_not_see_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Spark assigned GPU 5"):
        visible_devices(["5"], "0,1")
