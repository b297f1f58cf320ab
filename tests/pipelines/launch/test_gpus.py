"""GPUs as Spark hands them out, from a discovery script that knows of some: no GPU is touched."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(120)]


def launch(
    folder: str, master: str, devices: list[str], gpus_per_worker: int, visible: str | None
) -> tuple[list[str], str]:
    """`CUDA_VISIBLE_DEVICES` of both ranks, or the error."""
    from pyspark.sql import SparkSession

    from pipelines.launch.runner import BarrierRunner

    script = Path(folder, "discover.sh")
    script.write_text(f"#!/bin/sh\necho '{json.dumps({'name': 'gpu', 'addresses': devices})}'\n")
    script.chmod(0o755)
    executors = int(master.split("[")[1].split(",")[0])
    settings = {
        "spark.ui.enabled": "false",
        "spark.worker.resource.gpu.amount": str(len(devices)),
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": str(2 * gpus_per_worker // executors),
        "spark.task.resource.gpu.amount": str(gpus_per_worker),
    }
    if visible is not None:
        settings["spark.executorEnv.CUDA_VISIBLE_DEVICES"] = visible
    spark = SparkSession.builder.master(master).config(map=dict(settings)).getOrCreate()
    try:
        runner = BarrierRunner(spark, 2, gpus_per_worker=gpus_per_worker)
        return runner.run_all(lambda: os.environ["CUDA_VISIBLE_DEVICES"]), ""
    except RuntimeError as error:
        return [], str(error)
    finally:
        spark.stop()


def test_several_gpus_for_each_task_by_uuid_and_mig_id(in_fresh_process: Callable[..., Any], tmp_path: Path) -> None:
    devices = ["GPU-8f2c11d0", "MIG-77aa0b3e", "GPU-1c5d92aa", "3"]
    assigned, error = in_fresh_process(launch, str(tmp_path), "local-cluster[1,2,1024]", devices, 2, None)
    assert error == ""
    assert sorted(device for text in assigned for device in text.split(",")) == sorted(devices)
    assert [len(text.split(",")) for text in assigned] == [2, 2]


def test_positions_count_among_what_the_executor_may_see(in_fresh_process: Callable[..., Any], tmp_path: Path) -> None:
    assigned, error = in_fresh_process(launch, str(tmp_path), "local-cluster[1,2,1024]", ["0", "1"], 1, "4,GPU-8f2c")
    assert error == ""
    assert sorted(assigned) == ["4", "GPU-8f2c"]


def test_one_gpu_for_two_executors_of_a_host_is_refused(in_fresh_process: Callable[..., Any], tmp_path: Path) -> None:
    _, error = in_fresh_process(launch, str(tmp_path), "local-cluster[2,1,1024]", ["0"], 1, None)
    assert "GPU 0 of host" in error
    assert "was given to two tasks" in error
