import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.tracking.runs import start_run
from pipelines.tracking.store import TrackedRun


@pytest.fixture
def run(mlflow_store: str) -> TrackedRun:
    return start_run("tests", "name", {"a.b": 1}, {"tag": "value"})


class Server:
    """A real MLflow server on loopback, which can be killed and started again with what it held."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it where it does not run; returns when it answers."""
        if self.process is not None:
            return
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db",
            "--artifacts-destination", str(self.folder / "artifacts"),
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # a process less to start
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=self.folder, start_new_session=True
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                assert self.process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.1)

    def kill(self) -> None:
        """Kill it with all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def mlflow_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(mlflow_process: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, which answers when the test begins."""
    mlflow_process.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_process.uri)
    return mlflow_process
