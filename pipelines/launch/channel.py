"""What workers tell the driver while they run: JSON lines over TCP, each connection proved by a per-run secret."""

import hmac
import json
import logging
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

_NONCE_BYTES = 32
_AUTHENTICATION_TIMEOUT_SECONDS = 10
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

    def __init__(self, host: str, on_message: Callable[[Message], None]) -> None:
        """Bind a random port of `host` and serve until `close`."""
        lock = threading.Lock()
        secret = secrets.token_bytes(_NONCE_BYTES)

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.connection.settimeout(_AUTHENTICATION_TIMEOUT_SECONDS)
                nonce = secrets.token_bytes(_NONCE_BYTES)
                self.wfile.write(nonce)
                try:
                    if not hmac.compare_digest(self.rfile.read(_NONCE_BYTES), _answer(secret, nonce)):
                        return
                    self.connection.settimeout(None)
                    while line := self.rfile.readline(_MAXIMUM_LINE_BYTES):
                        message = json.loads(line)
                        with lock:
                            on_message(message)
                except (OSError, ValueError) as error:
                    _log.warning("dropped a connection of the log channel: %s", error)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server((host, 0), Handler)
        self.address = ChannelAddress(host, self._server.server_address[1], secret)
        threading.Thread(target=self._server.serve_forever, name="groundswell-channel", daemon=True).start()

    def close(self) -> None:
        """Stop listening; open connections end with their senders."""
        self._server.shutdown()
        self._server.server_close()


class Sender:
    """A worker's end. A channel that dies is reported once and then ignored: training goes on."""

    def __init__(self, address: ChannelAddress) -> None:
        """Connect and prove the secret.

        Raises:
            OSError: The driver cannot be reached.
        """
        self._socket = socket.create_connection((address.host, address.port), _AUTHENTICATION_TIMEOUT_SECONDS)
        nonce = self._socket.recv(_NONCE_BYTES, socket.MSG_WAITALL)
        self._socket.sendall(_answer(address.secret, nonce))
        self._lock = threading.Lock()
        self._alive = True

    def send(self, message: Message) -> None:
        """Send one message; lines of one sender arrive in order."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if not self._alive:
                return
            try:
                self._socket.sendall(line)
            except OSError as error:
                self._alive = False
                _log.warning("the log channel to the driver broke (%s); the run goes on without it", error)

    def close(self) -> None:
        """Flush and close."""
        with self._lock:
            self._alive = False
            self._socket.close()


def _answer(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")
