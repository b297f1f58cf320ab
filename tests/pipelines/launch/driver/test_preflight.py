"""What each task says about itself, judged; the checks before that are in test_runner and test_gpus."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.launch.driver import preflight
from pipelines.launch.driver.preflight import check_cluster, check_tasks, gpus_per_task, unused_gpus
from pipelines.launch.wire.messages import Hello
from tests.patience import patient

OWN_VERSION = "1.0.0 (code 5f0c21a9d3e7)"


def hello(task: int = 0, **changes: Any) -> Hello:
    versions = {"python": "3.11.7", "horovod": "0.28.1", "groundswell": OWN_VERSION}
    return replace(Hello(task, "10.0.0.1", None, "-1", "", "node", "10.0.0.1", 8000, versions), **changes)


def other_host(**changes: Any) -> Hello:
    return hello(1, **{"host": "10.0.0.2", "resolves_to": "10.0.0.2", **changes})


@pytest.mark.parametrize(
    "hellos",
    [
        [hello(0), hello(1)],
        [hello(0), other_host()],
        [hello(0, resolves_to="127.0.1.1"), hello(1, resolves_to="127.0.1.1")],
        [hello(0, devices="0,1"), hello(1, devices="2,3")],
        [hello(0, devices="0"), other_host(devices="0")],
    ],
    ids=["one host", "two", "a loopback name on one host", "own GPUs", "GPUs of two hosts"],
)
def test_what_fits_passes(hellos: list[Hello]) -> None:
    check_tasks(hellos, OWN_VERSION)


NAME = r"10\.0\.0\.2 .*'node' to {}.* map 'node' to 10\.0\.0\.2 in its /etc/hosts"


@pytest.mark.parametrize(
    ("hellos", "error"),
    [
        ([hello(0), other_host(resolves_to="127.0.1.1")], NAME.format(r"127\.0\.1\.1")),
        ([hello(0), other_host(resolves_to="nothing (name unknown)")], NAME.format("nothing")),
        ([hello(0), other_host(resolves_to="10.9.9.9, which is no address of that host")], NAME.format(r"10\.9")),
        ([hello(0, devices="GPU-77,GPU-8f"), hello(1, devices="GPU-8f")], r"GPU GPU-8f of host 10\.0\.0\.1 was given"),
        (
            [hello(0, versions={"python": "3", "horovod": "1.0"}), other_host(versions={"python": "3"})],
            r"different versions of horovod: 1\.0 on 10\.0\.0\.1, none on 10\.0\.0\.2; .*spark\.pyspark\.python",
        ),
        *(
            (
                [hello(task, versions={"python": "3", "groundswell": found}) for task in range(2)],
                rf"^the driver runs groundswell {re.escape(OWN_VERSION)}, and the executor on 10\.0\.0\.1 would run "
                rf"{re.escape(found)}: install one",
            )
            for found in ("1.0.0 (code 000000000000)", "0.9.0 (code 000000000000)", "1.0.0")
        ),
        ([hello(0, complaint="Spark gave a task 0 GPUs")], r"host 10\.0\.0\.1: Spark gave a task 0 GPUs"),
    ],
)
def test_what_does_not_fit_is_named(hellos: list[Hello], error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        check_tasks(hellos, OWN_VERSION)


def test_a_containers_shared_memory_is_said_where_nccl_may_need_it(caplog: pytest.LogCaptureFixture) -> None:
    check_tasks([hello(0, shared_memory_mib=64), hello(1, shared_memory_mib=64)], OWN_VERSION)
    check_tasks([hello(0, devices="0", shared_memory_mib=64)], OWN_VERSION)
    check_tasks([hello(0, devices="0"), hello(1, devices="1")], OWN_VERSION)
    assert caplog.messages == []
    check_tasks([hello(0, devices="0", shared_memory_mib=64), hello(1, devices="1", shared_memory_mib=64)], OWN_VERSION)
    (message,) = caplog.messages
    assert message.startswith("host 10.0.0.1 has 64 MiB in /dev/shm, through which NCCL connects GPUs")
    assert "--shm-size 1g" in message


def session(start: float = 0, **settings: str) -> Any:
    """A session on `spark://host:7077` with these settings, which was started then."""
    return SimpleNamespace(
        sparkContext=SimpleNamespace(getConf=lambda: settings, master="spark://host:7077", startTime=int(start * 1000))
    )


def test_gpus_of_a_task() -> None:
    amount = "spark.task.resource.gpu.amount"
    assert [gpus_per_task(session(**given)) for given in ({}, {amount: "1"}, {amount: "2"})] == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"gpu\.amount=0\.25 gives one GPU to 4 tasks, and NCCL .*amount=1"):
        gpus_per_task(session(**{amount: "0.25"}))
    with pytest.raises(RuntimeError, match=r"^gpus_per_worker=2, but Spark gives a task 1 GPU: set spark\.task\."):
        check_cluster(session(**{amount: "1"}), 1, 2)


@pytest.mark.parametrize("owner", ["task", "executor"])
def test_gpus_that_the_workers_do_not_use_are_named(owner: str) -> None:
    spark = session(**{f"spark.{owner}.resource.gpu.amount": "1"})
    assert f"spark.{owner}.resource.gpu.amount=1 reserves GPUs for each {owner}" in unused_gpus(spark, 0)
    assert unused_gpus(spark, 1) == unused_gpus(session(), 0) == ""


def test_settings_that_leave_cores_unused_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "count_slots", lambda spark, wanted: 1)
    spark = session(**{"spark.executor.cores": "7", "spark.task.cpus": "4"})
    with pytest.raises(
        RuntimeError,
        match=r"2 workers do not fit 1 slot of spark://host:7077: .* \(spark\.executor\.cores=7 and "
        r"spark\.task\.cpus=4 make 1 slot an executor and leave 3 cores unused\)",
    ):
        check_cluster(spark, 2, 0)


def test_an_executor_that_spark_has_just_started_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has slots a moment before it has a port."""
    monkeypatch.setattr(preflight, "answers", lambda host, port: (host, port) == ("10.0.0.1", "7079"))
    places = {"driver": "10.0.0.9:7078", "0": "10.0.0.1:7079", "1": "10.0.0.1", "2": "10.0.0.2:7079"}
    executors = [
        SimpleNamespace(id=lambda name=name: name, hostPort=lambda place=place: place) for name, place in places.items()
    ]
    dropped: list[str] = []
    jvm_context = SimpleNamespace(
        statusStore=lambda: SimpleNamespace(
            executorList=lambda active: SimpleNamespace(size=lambda: len(executors), apply=executors.__getitem__)
        ),
        killAndReplaceExecutor=dropped.append,
        isStopped=lambda: False,
    )
    spark = session()
    spark.sparkContext._jsc = SimpleNamespace(sc=lambda: jvm_context)
    preflight.drop_lost_executors(spark, {"10.0.0.2"})
    assert dropped == [], "its silence says nothing where the driver never reached it"
    preflight.drop_lost_executors(spark)
    assert dropped == ["2"]


@pytest.mark.parametrize(
    ("seen", "age", "found"),
    [([0, 0, 1, 2, 2, 2, 2], 5, 2), ([3], 3600, 3), ([1, 1, 1, 1], 5, 1)],
    ids=["they register", "an old session", "one"],
)
def test_executors_that_have_just_been_started_are_waited_for(
    seen: list[int], age: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = iter(seen)
    monkeypatch.setattr(preflight, "count_slots", lambda spark: next(slots, seen[-1]))
    monkeypatch.setattr(preflight, "SETTLED_SECONDS", patient(0.05))
    monkeypatch.setattr(preflight, "LOOK_SECONDS", 0.03)
    assert preflight.settled_slots(session(time.time() - age)) == found


def test_no_executor_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "count_slots", lambda spark: 0)
    monkeypatch.setattr(preflight, "REGISTRATION_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match=r"^no executor of spark://host:7077 has a free slot for a worker"):
        preflight.settled_slots(session())
