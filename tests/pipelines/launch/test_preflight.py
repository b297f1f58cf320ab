"""What each task says about itself, judged; the checks before that are in test_runner and test_gpus."""

from dataclasses import replace
from typing import Any

import pytest

from pipelines.launch.messages import Hello
from pipelines.launch.preflight import check_tasks


def hello(task: int = 0, **changes: Any) -> Hello:
    plain = Hello(
        task=task,
        host="10.0.0.1",
        probe_port=None,
        devices="-1",
        complaint="",
        hostname="node",
        resolves_to="10.0.0.1",
        versions={"python": "3.11.7", "horovod": "0.28.1"},
    )
    return replace(plain, **changes)


def test_equal_tasks_pass() -> None:
    check_tasks([hello(0), hello(1)])
    check_tasks([hello(0), hello(1, host="10.0.0.2", resolves_to="10.0.0.2")])


def test_a_loopback_name_matters_on_several_hosts_only() -> None:
    check_tasks([hello(0, resolves_to="127.0.1.1"), hello(1, resolves_to="127.0.1.1")])
    with pytest.raises(
        RuntimeError, match=r"10\.0\.0\.2 .*'node' to 127\.0\.1\.1.* map 'node' to 10\.0\.0\.2 in its /etc/hosts"
    ):
        check_tasks([hello(0), hello(1, host="10.0.0.2", resolves_to="127.0.1.1")])


@pytest.mark.parametrize("resolved", ["nothing (name unknown)", "10.9.9.9, which is no address of that host"])
def test_a_name_that_leads_nowhere(resolved: str) -> None:
    with pytest.raises(RuntimeError, match=r"/etc/hosts"):
        check_tasks([hello(0), hello(1, host="10.0.0.2", resolves_to=resolved)])


@pytest.mark.parametrize("package", ["python", "tensorflow-cpu", "horovod", "groundswell"])
def test_different_versions(package: str) -> None:
    hellos = [hello(task, versions={"python": "3", package: version}) for task, version in enumerate(("1.0", "none"))]
    with pytest.raises(
        RuntimeError, match=rf"different versions of {package}: 1\.0 on 10\.0\.0\.1, none on .*spark\.pyspark\.python"
    ):
        check_tasks(hellos)


def test_a_gpu_given_twice() -> None:
    check_tasks([hello(0, devices="0,1"), hello(1, devices="2,3")])
    check_tasks([hello(0, devices="0"), hello(1, devices="0", host="10.0.0.2", resolves_to="10.0.0.2")])
    with pytest.raises(RuntimeError, match=r"GPU GPU-8f of host 10\.0\.0\.1 was given to two tasks"):
        check_tasks([hello(0, devices="GPU-77,GPU-8f"), hello(1, devices="GPU-8f")])


def test_a_tasks_own_complaint() -> None:
    with pytest.raises(RuntimeError, match=r"host 10\.0\.0\.1: Spark gave a task 0 GPUs"):
        check_tasks([hello(0, complaint="Spark gave a task 0 GPUs")])
