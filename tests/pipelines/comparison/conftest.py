"""Trainings that were recorded and did not run."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from conf.load import load
from pipelines.tracking.store import runs
from pipelines.training.setup.description import dataset_facts, parameters_of

STEPS, START = 4, 1_700_000_000_000
Fabricate = Callable[..., str]


@pytest.fixture(autouse=True)
def _use_store(module_mlflow_store: str) -> None:
    """Every test of this folder reads and writes the store of its module."""


@pytest.fixture
def fabricate(module_mlflow_store: str, eurosat_manifest: Callable[..., Any]) -> Fabricate:
    """Records a training with the settings that a real one would have; the run's identifier."""

    def make(
        experiment: str,
        *settings: str,
        scores: Sequence[float] = (0.2, 0.5, 0.6),
        losses: Sequence[float] = (2.0, 1.0, 0.5),
        images_per_second: float | Sequence[float] = 100.0,
        payload_bytes: float = 1000.0,
        status: runs.Status | None = "FINISHED",
        diverged: str = "",
        parent: str = "",
        source: str = "groundswell train",
        name: str = "name",
    ) -> str:
        config = load("smoke", [f"training.epochs={len(losses)}", *settings])
        tags = {"mlflow.source.name": source}
        tags |= {"diverged": diverged} if diverged else {}
        tags |= {"mlflow.parentRunId": parent} if parent else {}
        manifest = eurosat_manifest(0)
        run = runs.start_run(
            experiment, name, parameters_of(config, manifest), tags, dataset=dataset_facts("dataset", manifest)
        )
        rates = images_per_second if isinstance(images_per_second, Sequence) else [images_per_second] * len(losses)
        points = []
        for epoch, loss in enumerate(losses, 1):
            step, time = epoch * STEPS, START + 60_000 * epoch
            values = {"train/loss": loss, "val/loss": 1.1 * loss, "speed/images_per_second": rates[epoch - 1]}
            values |= {"exchange/payload_bytes_total": payload_bytes * step}
            values |= {"val/top_1": scores[epoch - 1]} if epoch <= len(scores) else {}
            points += [Metric(key, value, time, step) for key, value in values.items() if math.isfinite(value)]
        MlflowClient(module_mlflow_store).log_batch(run.run_id, metrics=points)
        if status is not None:
            runs.end_run(run, status)
        return run.run_id

    return make
