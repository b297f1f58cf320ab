"""Models that a process of an executor keeps, and the GPU that it uses; without TensorFlow."""

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.scoring.predict import predictor as module
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.predict.predictor import forget, load_keras, predictor, task_threads


@pytest.fixture(autouse=True)
def nothing_is_loaded() -> Iterator[None]:
    forget()
    yield
    forget()


def test_a_model_is_loaded_once_in_a_process_and_another_one_takes_its_place() -> None:
    loads: list[str] = []

    def loaded(name: str, batch_size: int = 8) -> Any:
        def new() -> Any:
            loads.append(name)
            return f"loaded {name} {len(loads)}"

        return predictor(name, new, batch_size, threads=1)

    assert [loaded("a") for _ in range(3)] == ["loaded a 1"] * 3, "one for all parts of one job"
    assert loaded("a", batch_size=16) == "loaded a 2", "it is made for one batch size"
    assert [loaded("b"), loaded("a")] == ["loaded b 3", "loaded a 4"], "no process holds two models"


def in_task(monkeypatch: pytest.MonkeyPatch, resources: dict[str, Any], cores: int = 1) -> None:
    context = SimpleNamespace(resources=lambda: resources, cpus=lambda: cores)
    monkeypatch.setattr(module, "TaskContext", SimpleNamespace(get=lambda: context))


def test_a_process_uses_the_gpus_of_its_first_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for addresses, seen in (
        (None, "7"),  # the task has no GPU of its own
        (["1", "3"], "1,3"),
        (["2"], "1,3"),  # TensorFlow has looked already
    ):
        in_task(monkeypatch, {} if addresses is None else {"gpu": SimpleNamespace(addresses=addresses)})
        module.use_own_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
        if addresses is not None:
            monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace())


@pytest.mark.parametrize(("chosen", "found"), [(None, "true"), ("false", "false")])
def test_workers_that_share_a_gpu_take_its_memory_as_they_need_it(
    chosen: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)  # its import fails, before which TensorFlow's variables are set
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.setenv(name, chosen or "")  # it is put back after the test
        if chosen is None:
            monkeypatch.delenv(name)
    model = ModelDescription("runs:/1/model", "m-1", "m-1", "multi_label", ("Sea",), ())
    with pytest.raises(ImportError):
        load_keras(model, b"", 8, threads=1)
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == found


def test_a_task_has_as_many_threads_as_spark_gives_it_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    in_task(monkeypatch, {}, cores=4)
    assert (task_threads(None), task_threads(2)) == (4, 2)
