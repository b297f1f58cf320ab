"""GPUs as Spark hands them out, from a discovery script that knows of some: no GPU is touched."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipelines.launch.rank import cuda
from pipelines.launch.runner import BarrierRunner

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


def devices_of_two_ranks(discovery: str) -> list[str]:
    """On an executor with two slots and four GPUs, of which a task has two."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.worker.resource.gpu.amount": "4",
        "spark.worker.resource.gpu.discoveryScript": discovery,
        "spark.executor.resource.gpu.amount": "4",
        "spark.task.resource.gpu.amount": "2",
        "spark.executorEnv.CUDA_VISIBLE_DEVICES": "GPU-8f2c11d0,MIG-77aa0b3e,GPU-1c5d92aa,5",
    }
    with SparkSession.builder.master("local-cluster[1,2,1024]").config(map=dict(settings)).getOrCreate() as spark:
        return BarrierRunner(spark, 2, gpus_per_worker=2).run_all(os.getenv, "CUDA_VISIBLE_DEVICES")


@pytest.mark.long
def test_several_gpus_for_each_task_are_mapped_through_what_the_executor_may_see(
    in_fresh_process: Callable[..., Any], tmp_path: Path
) -> None:
    discovery = script(tmp_path / "discover.sh", json.dumps({"name": "gpu", "addresses": ["0", "1", "2", "3"]}))
    each = [text.split(",") for text in in_fresh_process(devices_of_two_ranks, str(discovery))]
    assert ([len(devices) for devices in each], sorted(device for devices in each for device in devices)) == (
        [2, 2],
        [
            "5",
            "GPU-1c5d92aa",
            "GPU-8f2c11d0",
            "MIG-77aa0b3e",
        ],
    )


def test_one_gpu_for_two_ranks_of_a_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,4")
    with pytest.raises(RuntimeError, match=r"GPU 4 of host 127\.0\.0\.1 was given to two tasks"):
        BarrierRunner(None, 2, gpus_per_worker=1).run(len, "")


def test_a_driver_that_cannot_serve_this_tensorflow_is_said_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    smi = script(tmp_path / "bin" / "nvidia-smi", "| NVIDIA-SMI 470.57.02  Driver Version: 470  CUDA Version: 11.4 |")
    build = tmp_path / "tensorflow" / "python" / "platform" / "build_info.py"
    build.parent.mkdir(parents=True)
    build.write_text("build_info = {'is_cuda_build': True, 'cuda_version': '12.5.1'}\n")
    (tmp_path / "tensorflow" / "__init__.py").touch()
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    cuda.complaint.cache_clear()
    try:
        with pytest.raises(RuntimeError) as caught:
            BarrierRunner(None, 1, gpus_per_worker=1).run(len, "")
    finally:
        cuda.complaint.cache_clear()
    assert str(caught.value) == (
        "host 127.0.0.1: its NVIDIA driver serves CUDA 11, and this TensorFlow is built for CUDA 12.5.1, so that it "
        "would train on the CPU: install an NVIDIA driver of version 525 or newer, or a TensorFlow for CUDA 11"
    )
