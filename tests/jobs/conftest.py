"""Trainings that were recorded and did not run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def record(module_mlflow_store: str, eurosat_manifest: Callable[..., Any]) -> Callable[..., str]:
    """Records a finished training of two epochs, or another kind of run; its identifier."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from conf.load import load
    from pipelines.tracking.store import runs
    from pipelines.training.setup.description import parameters_of

    def make(experiment: str, *settings: str, source: str = "groundswell train", parent: str = "") -> str:
        tags = {"mlflow.source.name": source, **({"mlflow.parentRunId": parent} if parent else {})}
        run = runs.start_run(experiment, None, parameters_of(load("smoke", list(settings)), eurosat_manifest()), tags)
        values = {"train/loss": (1.0, 0.5), "val/top_1": (0.6, 0.7), "speed/images_per_second": (10.0, 10.0)}
        points = [Metric(name, pair[epoch], 1000, 4 * (epoch + 1)) for name, pair in values.items() for epoch in (0, 1)]
        MlflowClient(module_mlflow_store).log_batch(run.run_id, metrics=points)
        runs.end_run(run, "FINISHED")
        return run.run_id

    return make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
