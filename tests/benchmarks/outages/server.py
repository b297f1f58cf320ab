"""A real MLflow server on loopback, and a door in front of it that can be slow or broken."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.patience import patient


class Server:
    """An MLflow server, which can be killed and started again with what it held."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start it where it does not run; returns when it answers."""
        with self._starting:
            self._start()

    def _start(self) -> None:
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
        deadline = time.monotonic() + patient(120)
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


@dataclass(frozen=True)
class Request:
    """A request that a server has answered."""

    path: str
    authorization: str | None
    """The header of this name."""
    body: bytes
    status: int
    """Of the answer."""


class Door:
    """Passes requests on to a server: at once, late, or with an error in place of an answer."""

    def __init__(self, server: Server) -> None:
        self.answered: list[Request] = []
        """In the order in which the server has answered them."""
        self.seconds_late = 0.0
        self.seconds_of_a_file = 0.0
        """How much later a file is taken, as by a server that hands it on to another storage."""
        self.fails = False
        self.largest_file: int | None = None
        """Bytes of the largest file that a proxy passes on; it answers 413 to a larger one."""
        door = self

        class Handler(BaseHTTPRequestHandler):
            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                time.sleep(door.seconds_late + (door.seconds_of_a_file if self.command == "PUT" else 0))
                if door.fails:
                    self.send_error(500)
                    return
                if self.command == "PUT" and door.largest_file is not None and len(body) > door.largest_file:
                    self.send_error(413)
                    return
                try:
                    status, headers, answer = _ask(server.port, self.command, self.path, self.headers, body)
                except OSError:  # the server is away: so is its door
                    self.close_connection = True
                    return
                door.answered.append(Request(self.path, self.headers.get("Authorization"), body, status))
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass  # noqa: N815  names of http.server

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask(port: int, method: str, path: str, headers: Any, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        passed = {name: value for name, value in headers.items() if name.lower() not in ("host", "connection")}
        connection.request(method, path, body=body, headers=passed)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()
