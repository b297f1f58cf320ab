"""Trainings whose ranks are killed, and the weights with which they end."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from conf.load import load
from jobs.train import TrainedRun, train
from tests.parallel.trainings import Trained, let_die, train_named, train_once


@pytest.fixture
def let_ranks_die(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets ranks of the next trainings die, each once: `let_ranks_die((rank, steps done), ...)`."""
    return lambda *deaths: let_die(monkeypatch, *deaths)


@pytest.fixture(scope="session")
def undisturbed(
    spark: SparkSession, small_dataset: Path, new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trained]:
    """One of the trainings of `trainings.SETTINGS`, of which nothing may be changed."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    return lambda name: train_once(name, shared / f"undisturbed-{name}", small_dataset, new_store)


@pytest.fixture
def disturbed(spark: SparkSession, small_dataset: Path, tmp_path: Path, mlflow_store: str) -> Callable[..., Trained]:
    """Trains as `undisturbed` does, while ranks die: `disturbed(name, [(rank, steps done), ...], *settings)`."""

    def train(name: str, deaths: list[tuple[Any, ...]], *settings: str, waits: bool = False) -> Trained:
        return train_named(name, small_dataset, tmp_path / "out", mlflow_store, deaths, *settings, waits=waits)

    return train


@pytest.fixture
def train_small(
    spark: SparkSession, small_dataset: Path, small_network: str, tmp_path: Path, mlflow_store: str
) -> Callable[..., TrainedRun]:
    """Trains the smallest network as `groundswell train` does, with an output below the test's folder."""

    def train_with(*settings: str, output: str = "out") -> TrainedRun:
        fixed = [f"dataset.path={small_dataset}", f"training.output={tmp_path / output}", small_network]
        return train(load("smoke", [*fixed, *settings]))

    return train_with


@pytest.fixture(scope="session")
def weights() -> Callable[[TrainedRun], dict[str, np.ndarray]]:
    """Reads every array of a training's last checkpoint."""
    return lambda trained: Trained(trained, "").weights()
