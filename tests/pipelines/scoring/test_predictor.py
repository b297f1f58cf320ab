"""Models that a process of an executor keeps, and the GPU that it uses; without TensorFlow."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.scoring import predictor as module
from pipelines.scoring.model import ModelDescription
from pipelines.scoring.predictor import LoadSettings, load_keras, predictor, task_threads


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_loaded", {})


def test_a_model_is_loaded_once_in_a_process_and_another_one_takes_its_place() -> None:
    loads: list[str] = []

    def loaded(name: str, batch_size: int = 8) -> Any:
        def new() -> Any:
            loads.append(name)
            return f"loaded {name} {len(loads)}"

        return predictor(name, new, LoadSettings(batch_size, threads=1))

    assert [loaded("a") for _ in range(3)] == ["loaded a 1"] * 3, "one for all parts of one job"
    assert loaded("a", batch_size=16) == "loaded a 2", "it is made for one batch size"
    assert loaded("b") == "loaded b 3"
    assert len(module._loaded) == 1, "no process holds two models"
    assert loaded("a") == "loaded a 4"


def in_task(monkeypatch: pytest.MonkeyPatch, resources: dict[str, Any], cores: int = 1) -> None:
    context = SimpleNamespace(resources=lambda: resources, cpus=lambda: cores)
    monkeypatch.setattr(module, "TaskContext", SimpleNamespace(get=lambda: context))


def test_a_process_uses_the_gpus_of_its_first_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    in_task(monkeypatch, {})
    module._use_own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7", "the task has no GPU of its own"
    in_task(monkeypatch, {"gpu": SimpleNamespace(addresses=["1", "3"])})
    module._use_own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace())
    in_task(monkeypatch, {"gpu": SimpleNamespace(addresses=["2"])})
    module._use_own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,3", "TensorFlow has looked already"


def test_workers_that_share_a_gpu_take_its_memory_as_they_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []

    def importing() -> Any:
        found.append(os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH"))
        raise ImportError("TensorFlow would read the variable now")

    monkeypatch.setattr(module, "_quiet_import", importing)
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.setenv(name, "")  # it is put back after the test
        monkeypatch.delenv(name)
    model = ModelDescription("runs:/1/model", "m-1", "m-1", "multi_label", ("Sea",), ())
    for _ in range(2):
        with pytest.raises(ImportError, match="would read the variable now"):
            load_keras(model, b"", LoadSettings(8, threads=1))
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    assert found == ["true", "false"], "what the user has set stays"


def test_a_task_has_as_many_threads_as_spark_gives_it_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    in_task(monkeypatch, {}, cores=4)
    assert task_threads(None) == 4
    assert task_threads(2) == 2
