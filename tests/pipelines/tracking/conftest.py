import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mlflow import MlflowClient

from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store.runs import start_run
from pipelines.tracking.store.store import TrackedRun

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the benchmark of outages has the same server

if TYPE_CHECKING:
    from outages.server import Door, Server


@pytest.fixture
def run(mlflow_store: str) -> TrackedRun:
    return start_run("tests", "name", {"a.b": 1}, {"tag": "value"})


@pytest.fixture
def client(mlflow_store: str) -> MlflowClient:
    return MlflowClient(mlflow_store)


@pytest.fixture
def writer(run: TrackedRun, tmp_path: Path) -> RunWriter:
    return RunWriter(run, tmp_path / "journal")


@pytest.fixture(scope="module")
def mlflow_process(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    from outages.server import Server

    server = Server(tmp_path_factory.mktemp("mlflow"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(mlflow_process: "Server", monkeypatch: pytest.MonkeyPatch) -> "Server":
    """The server, which answers when the test begins."""
    mlflow_process.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_process.uri)
    return mlflow_process


@pytest.fixture
def door(server: "Server", monkeypatch: pytest.MonkeyPatch) -> "Iterator[Door]":
    """A proxy before the server, which runs are written through."""
    from outages.server import Door

    door = Door(server)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", door.uri)
    yield door
    door.close()
