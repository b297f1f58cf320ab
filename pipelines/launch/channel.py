"""What workers tell the driver while they run: JSON lines over TCP, each connection proved by a per-run secret."""

import hmac
import json
import logging
import queue
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

_NONCE_BYTES = 32
_CONNECT_SECONDS = 10.0
_DRAIN_SECONDS = 10.0
_QUEUED_MESSAGES = 10_000
_MAXIMUM_LINE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChannelAddress:
    """Where the driver listens, and the secret that opens the door."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret: this may be logged."""
        return f"ChannelAddress({self.host}:{self.port})"


class DriverChannel:
    """Listens on one address of the driver and hands each message to `on_message`, one at a time."""

    def __init__(self, host: str, on_message: Callable[[Message], None], bind: str | None = None) -> None:
        """Bind a random port and serve until `close`.

        Args:
            host: Where workers reach the driver.
            on_message: What it raises is logged, and the next message is handed on.
            bind: Address to listen on, where it is not `host`.
        """
        lock = threading.Lock()
        secret = secrets.token_bytes(_NONCE_BYTES)
        open_connections = self._open_connections = set[threading.Thread]()

        def deliver(message: Message) -> None:
            try:
                with lock:
                    on_message(message)
            except Exception:
                _log.exception("a callback of the log channel failed")

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    self.connection.settimeout(_CONNECT_SECONDS)
                    nonce = secrets.token_bytes(_NONCE_BYTES)
                    self.wfile.write(nonce)
                    if not hmac.compare_digest(self.rfile.read(_NONCE_BYTES), _answer(secret, nonce)):
                        return
                    self.connection.settimeout(None)
                    open_connections.add(threading.current_thread())
                    while line := self.rfile.readline(_MAXIMUM_LINE_BYTES):
                        deliver(json.loads(line))
                except (OSError, ValueError) as error:
                    _log.warning("dropped a connection of the log channel: %s", error)
                finally:
                    open_connections.discard(threading.current_thread())

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server((bind or host, 0), Handler)
        self.address = ChannelAddress(host, self._server.server_address[1], secret)
        threading.Thread(target=self._server.serve_forever, name="groundswell-channel", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and wait a while for what workers have sent already."""
        self._server.shutdown()
        self._server.server_close()
        deadline = time.monotonic() + _DRAIN_SECONDS
        for thread in list(self._open_connections):
            thread.join(max(0.0, deadline - time.monotonic()))


class Sender:
    """A worker's end: a queue and the thread that empties it, so that a slow or dead driver never stops training.

    When the queue is full, log lines are dropped and counted; when the channel dies, it is said once.
    """

    def __init__(self, address: ChannelAddress) -> None:
        """Connect and prove the secret.

        Raises:
            OSError: The driver cannot be reached.
        """
        self._socket = socket.create_connection((address.host, address.port), _CONNECT_SECONDS)
        nonce = self._socket.recv(_NONCE_BYTES, socket.MSG_WAITALL)
        self._socket.sendall(_answer(address.secret, nonce))
        self._socket.settimeout(None)
        self._queue: queue.Queue[Message | None] = queue.Queue(_QUEUED_MESSAGES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="groundswell-sender", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue one message; those of one sender arrive in order."""
        try:
            if message["kind"] == "log":
                self._queue.put_nowait(message)
            else:
                self._queue.put(message, timeout=_CONNECT_SECONDS)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Wait a while until everything is sent, then close."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=_DRAIN_SECONDS)
        self._thread.join(_DRAIN_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        alive = True
        while (message := self._queue.get()) is not None:
            if self._dropped and message["kind"] == "log":
                message = {**message, "line": f"{message['line']} [{self._dropped} lines before this were dropped]"}
                self._dropped = 0
            try:
                if alive:
                    self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError as error:
                alive = False
                _log.warning("the log channel to the driver broke (%s); the run goes on without it", error)


def _answer(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")
