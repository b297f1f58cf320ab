"""Between the driver and its tasks: JSON lines over TCP, both ends proved by a per-run secret, logs included.

A connection that breaks is made again; what was said meanwhile is said then, once and in order. A driver that cannot
be reached costs the driver's view and not the run.
"""

import hmac
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pipelines.launch.logs import Spool

Message = dict[str, Any]

_NONCE_BYTES = 32
_HANDSHAKE_SECONDS = 5.0
_RECONNECT_SECONDS = 1.0
_HEARTBEAT_SECONDS = 2.0
_LOG_PERIOD_SECONDS = 0.05
_LOG_BYTES_PER_PERIOD = 1 << 18  # 5 MiB/s for each rank
_MAXIMUM_LINE_BYTES = 1 << 22
_MAXIMUM_STRANGERS = 256
_QUEUED_MESSAGES = 1000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChannelAddress:
    """Where the driver listens, and the secret that opens the door."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class DriverChannel:
    """The driver's end: `events` holds `(task, message)` in order of arrival, `{"kind": "gone"}` for a lost connection.

    A task that Spark has started anew by itself is called off, and `{"kind": "replaced"}` says so.

    The queue is bounded: a driver that does not keep up slows the connections, never the workers.
    """

    def __init__(self, host: str, bind: str | None = None) -> None:
        """Bind a random port and serve until `close`.

        Args:
            host: Where tasks reach the driver.
            bind: Address to listen on, where it is not `host`.
        """
        self._listener = socket.create_server((bind or host, 0), backlog=1024)
        self.address = ChannelAddress(host, self._listener.getsockname()[1], secrets.token_bytes(_NONCE_BYTES))
        self.events: queue.Queue[tuple[int, Message]] = queue.Queue(_QUEUED_MESSAGES)
        self.peers: set[str] = set()
        """Addresses from which tasks have proved the secret."""
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._refused = 0
        self._connections: dict[int, socket.socket] = {}
        self._received: dict[int, list[int]] = {}
        self._links: dict[int, str] = {}
        self._seen: dict[int, float] = {}
        threading.Thread(target=self._accept, name="groundswell-channel", daemon=True).start()

    def send(self, task: int, message: Message) -> None:
        """Tell a task something; one that is not connected does not hear it."""
        with suppress(OSError, KeyError):
            self._connections[task].sendall(_line(message))

    def seconds_silent(self, task: int) -> float:
        """Since the task's last sign of life; tasks give one every two seconds."""
        return time.monotonic() - self._seen[task]

    def close(self) -> None:
        """Stop listening and hang up."""
        # A thread that waits in `accept` keeps a closed socket open: this wakes it.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = [*self._connections.values(), *self._strangers]
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._refused:
            _log.warning("refused %d connections that did not know this run's secret", self._refused)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._strangers[connection] = None
                # Those that connect and say nothing give way to newcomers: a task proves itself within milliseconds.
                if len(self._strangers) > _MAXIMUM_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._serve, args=(connection, address[0]), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with connection:
            try:
                proved = _check_task(connection, self.address.secret)
            except OSError:
                proved = False
            with self._lock:
                self._strangers.pop(connection, None)
                if not proved:
                    self._refused += 1
                    return
                self.peers.add(address)
            try:
                self._read(connection)
            except (OSError, ValueError) as error:
                _log.info("a connection of the channel ended: %s", error)

    def _read(self, connection: socket.socket) -> None:
        lines = connection.makefile("rb")
        opening = json.loads(lines.readline(_MAXIMUM_LINE_BYTES))
        hello: Message = opening["hello"]
        task: int = hello["task"]
        if self._links.setdefault(task, opening["link"]) != opening["link"]:
            connection.sendall(_line({"received": 0, "log_offset": 0}) + _line({"kind": "stop"}))
            self.events.put((task, {"kind": "replaced"}))
            return
        known = task in self._received
        received = self._received.setdefault(task, [0, 0])
        self._seen[task] = time.monotonic()
        connection.sendall(_line({"received": received[0], "log_offset": received[1]}))
        self._connections[task] = connection
        self.events.put((task, {"kind": "back"} if known else hello))
        try:
            while line := lines.readline(_MAXIMUM_LINE_BYTES):
                message = json.loads(line)
                if message["kind"] == "log":
                    if message["offset"] == received[1]:
                        received[1] = message["end"]
                        self.events.put((task, message))
                elif message["kind"] != "alive" and message["number"] > received[0]:
                    received[0] = message["number"]
                    self.events.put((task, message))
                self._seen[task] = time.monotonic()
        finally:
            if self._connections.get(task) is connection:
                del self._connections[task]
                self.events.put((task, {"kind": "gone"}))


class Link:
    """A task's end: says hello, then sends messages and the rank's log from threads of its own, and takes orders."""

    def __init__(self, address: ChannelAddress, hello: Message, log: Spool) -> None:
        """Start connecting.

        Args:
            address: The driver's.
            hello: The first message, with the number of the `task`.
            log: Sent as it grows, at a bounded rate.
        """
        self.orders: queue.Queue[Message] = queue.Queue()
        self._address, self._log = address, log
        self._opening = _line({"link": secrets.token_hex(8), "hello": hello})
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=_QUEUED_MESSAGES)
        self._last_number = self._next_number = 0
        self._log_offset = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self.connected = False
        self._thread = threading.Thread(target=self._run, name="groundswell-link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue one message; they arrive once and in order."""
        self._last_number += 1
        self._sent.append((self._last_number, _line({**message, "number": self._last_number})))
        self._wake.set()

    def flush(self, seconds: float) -> None:
        """Wait until everything is sent, the log too, as long as there is a connection."""
        deadline = time.monotonic() + seconds
        self._wake.set()
        while self.connected and time.monotonic() < deadline:
            if self._next_number > self._last_number and self._log_offset >= self._log.size():
                return
            time.sleep(0.01)

    def close(self) -> None:
        """Hang up."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_HANDSHAKE_SECONDS)

    def _run(self) -> None:
        warned = False
        while not self._closing.is_set():
            try:
                with socket.create_connection(
                    (self._address.host, self._address.port), _HANDSHAKE_SECONDS
                ) as connection:
                    self._talk(connection)
            except (OSError, ValueError) as error:
                if not warned and self._last_number:
                    warned = True
                    _log.warning("the channel to the driver broke (%s); the run goes on without it", error)
            self.connected = False
            self._closing.wait(_RECONNECT_SECONDS)

    def _talk(self, connection: socket.socket) -> None:
        _prove_task(connection, self._address.secret)
        connection.sendall(self._opening)
        lines = connection.makefile("rb")
        welcome = json.loads(lines.readline(_MAXIMUM_LINE_BYTES))
        self._next_number, self._log_offset = welcome["received"] + 1, welcome["log_offset"]
        connection.settimeout(None)
        self.connected = True
        listener = threading.Thread(target=self._listen, args=(lines,), daemon=True)
        listener.start()
        last_sent = time.monotonic()
        try:
            while not self._closing.is_set() and listener.is_alive():
                self._wake.wait(_LOG_PERIOD_SECONDS)
                self._wake.clear()
                log_offset = self._log_offset
                data = self._pending()
                if not data and time.monotonic() - last_sent > _HEARTBEAT_SECONDS:
                    data = _line({"kind": "alive"})
                if data:
                    connection.sendall(data)
                    last_sent = time.monotonic()
                if self._log_offset - log_offset > _LOG_BYTES_PER_PERIOD // 2:
                    self._closing.wait(_LOG_PERIOD_SECONDS)  # messages wake this loop, a talkative rank's log must not
        finally:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _pending(self) -> bytes:
        """The next part of the log, then the messages: the log never comes later than what was said after it."""
        parts = []
        lines, end = self._log.read(self._log_offset, _LOG_BYTES_PER_PERIOD)
        if end > self._log_offset:
            parts.append(_line({"kind": "log", "offset": self._log_offset, "end": end, "lines": lines}))
        for number, line in list(self._sent):
            if number >= self._next_number:
                parts.append(line)
                self._next_number = number + 1
        self._log_offset = end
        self._next_number = max(self._next_number, 1)
        return b"".join(parts)

    def _listen(self, lines: Any) -> None:
        with suppress(OSError, ValueError):
            while line := lines.readline(_MAXIMUM_LINE_BYTES):
                self.orders.put(json.loads(line))


def _check_task(connection: socket.socket, secret: bytes) -> bool:
    """The driver's part: each proves the secret over both nonces, neither sends it."""
    connection.settimeout(_HANDSHAKE_SECONDS)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    theirs, proof = _receive(connection), _receive(connection)
    if not hmac.compare_digest(proof, hmac.digest(secret, b"task" + nonce + theirs, "sha256")):
        return False
    connection.sendall(hmac.digest(secret, b"driver" + theirs + nonce, "sha256"))
    connection.settimeout(None)
    return True


def _prove_task(connection: socket.socket, secret: bytes) -> None:
    theirs = _receive(connection)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce + hmac.digest(secret, b"task" + theirs + nonce, "sha256"))
    if not hmac.compare_digest(_receive(connection), hmac.digest(secret, b"driver" + nonce + theirs, "sha256")):
        raise ConnectionError("who listens at the driver's address does not know this run's secret")


def _receive(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < _NONCE_BYTES:
        part = connection.recv(_NONCE_BYTES - len(data))
        if not part:
            raise ConnectionError("the other end hung up")
        data += part
    return data


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
