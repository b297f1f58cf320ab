"""GPUs as Spark hands them out, from a discovery script that knows of some: no GPU is touched."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Host:
    """What one machine offers to two ranks."""

    master: str
    devices: Sequence[str]
    gpus_per_worker: int
    visible: str = ""
    """`CUDA_VISIBLE_DEVICES` of the executors."""
    task_amount: str = ""
    """`spark.task.resource.gpu.amount`, where it is not `gpus_per_worker`."""
    has_old_driver: bool = False
    """Whether its driver serves CUDA 11 only, and its TensorFlow needs CUDA 12."""


HOSTS = {
    "four GPUs": Host(
        "local-cluster[1,2,1024]", ["0", "1", "2", "3"], 2, visible="GPU-8f2c11d0,MIG-77aa0b3e,GPU-1c5d92aa,5"
    ),
    "one GPU, two executors": Host("local-cluster[2,1,1024]", ["0"], 1),
    "UUIDs": Host("local-cluster[1,2,1024]", ["GPU-8f2c11d0", "MIG-77aa0b3e"], 1),
    "shared GPUs": Host("local-cluster[1,2,1024]", ["0", "1"], 1, task_amount="0.5"),
    "old driver": Host("local-cluster[1,2,1024]", ["0", "1"], 1, has_old_driver=True),
}
Assigned = tuple[list[str], str]


def launch_on_each(hosts: dict[str, Host], folder: str) -> dict[str, Assigned]:
    """By host: `CUDA_VISIBLE_DEVICES` of both ranks, and the error; sessions one after the other in one JVM."""
    from pyspark import SparkContext

    SparkContext._ensure_initialized()  # the settings of the session that starts a JVM would be those of all
    return {
        name: launch(host, Path(folder, f"discover-{number}.sh")) for number, (name, host) in enumerate(hosts.items())
    }


def launch(host: Host, script: Path) -> Assigned:
    from pyspark.sql import SparkSession

    from pipelines.launch.runner import BarrierRunner

    script.write_text(f"#!/bin/sh\necho '{json.dumps({'name': 'gpu', 'addresses': host.devices})}'\n")
    script.chmod(0o755)
    executors = int(host.master.split("[")[1].split(",")[0])
    settings = {
        "spark.ui.enabled": "false",
        "spark.worker.resource.gpu.amount": str(len(host.devices)),
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": str(2 * host.gpus_per_worker // executors),
        "spark.task.resource.gpu.amount": host.task_amount or str(host.gpus_per_worker),
    }
    if host.visible:
        settings["spark.executorEnv.CUDA_VISIBLE_DEVICES"] = host.visible
    if host.has_old_driver:
        settings |= old_driver(script.parent)
    spark = SparkSession.builder.master(host.master).config(map=dict(settings)).getOrCreate()
    try:
        runner = BarrierRunner(spark, 2, gpus_per_worker=host.gpus_per_worker)
        return runner.run_all(lambda: os.environ["CUDA_VISIBLE_DEVICES"]), ""
    except RuntimeError as error:
        return [], str(error)
    finally:
        spark.stop()


def old_driver(folder: Path) -> dict[str, str]:
    """A `nvidia-smi` and a TensorFlow of GPUs, for the executors."""
    smi, build = folder / "bin" / "nvidia-smi", folder / "gpu" / "tensorflow" / "python" / "platform" / "build_info.py"
    for file in (smi, build):
        file.parent.mkdir(parents=True)
    smi.write_text("#!/bin/sh\necho '| NVIDIA-SMI 470.57.02  Driver Version: 470.57.02  CUDA Version: 11.4 |'\n")
    smi.chmod(0o755)
    (folder / "gpu" / "tensorflow" / "__init__.py").touch()
    build.write_text("build_info = {'is_cuda_build': True, 'cuda_version': '12.5.1'}\n")
    return {
        "spark.executorEnv.PATH": f"{smi.parent}:{os.environ['PATH']}",
        "spark.executorEnv.PYTHONPATH": f"{folder / 'gpu'}:{os.environ['PYTHONPATH']}",
    }


@pytest.fixture(scope="module")
def launched(in_fresh_process: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Assigned]:
    found: dict[str, Assigned] = in_fresh_process(launch_on_each, HOSTS, str(tmp_path_factory.mktemp("scripts")))
    return found


def test_several_gpus_for_each_task_are_mapped_through_what_the_executor_may_see(launched: dict[str, Assigned]) -> None:
    assigned, error = launched["four GPUs"]
    assert error == ""
    assert sorted(device for text in assigned for device in text.split(",")) == [
        "5",
        "GPU-1c5d92aa",
        "GPU-8f2c11d0",
        "MIG-77aa0b3e",
    ]
    assert [len(text.split(",")) for text in assigned] == [2, 2]


def test_one_gpu_for_two_executors_of_a_host_is_refused(launched: dict[str, Assigned]) -> None:
    _, error = launched["one GPU, two executors"]
    assert "GPU 0 of host" in error
    assert "was given to two tasks" in error


def test_addresses_may_be_uuids_of_gpus_and_of_their_parts(launched: dict[str, Assigned]) -> None:
    assigned, error = launched["UUIDs"]
    assert error == ""
    assert sorted(assigned) == ["GPU-8f2c11d0", "MIG-77aa0b3e"]


def test_fractions_of_a_gpu_are_refused(launched: dict[str, Assigned]) -> None:
    _, error = launched["shared GPUs"]
    assert error.startswith("spark.task.resource.gpu.amount=0.5 gives one GPU to 2 tasks, and NCCL does not let two")


def test_a_driver_that_cannot_serve_this_tensorflow_is_said_before_a_rank_starts(launched: dict[str, Assigned]) -> None:
    _, error = launched["old driver"]
    assert error.startswith("host ")
    assert (
        ": its NVIDIA driver serves CUDA 11, and this TensorFlow is built for CUDA 12.5.1, so that it would train on "
        "the CPU: install an NVIDIA driver of version 525 or newer, or a TensorFlow for CUDA 11" in error
    )
