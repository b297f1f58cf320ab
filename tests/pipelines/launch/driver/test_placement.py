import pytest

from pipelines.launch.driver.placement import devices_of_hosts, place, visible_devices


def test_horovods_own_plan_agrees() -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    placed = place(["a", "b", "a", "c", "a", "b"])
    assert [placement.rank for placement in placed] == [0, 3, 1, 5, 2, 4]
    theirs = get_host_assignments(parse_hosts("a:3,b:2,c:1"), 6)
    assert [
        (p.host, p.rank, p.size, p.local_rank, p.local_size, p.cross_rank, p.cross_size)
        for p in sorted(placed, key=lambda placement: placement.rank)
    ] == [(p.hostname, p.rank, p.size, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in theirs]


def test_ranks_of_a_host_see_each_others_gpus_in_the_order_of_local_ranks() -> None:
    assert devices_of_hosts(place(["a", "b", "a", "c", "d"]), ["3", "0", "1", "-1", "4,5"]) == {
        "a": {"CUDA_VISIBLE_DEVICES": "3,1"},
        "b": {"CUDA_VISIBLE_DEVICES": "0"},
    }


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
