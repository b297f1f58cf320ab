"""The driver's end of the connections to its tasks; `link` has the other end.

Messages are JSON lines over TCP, and both ends prove that they know the secret of the run. A task whose connection
breaks connects again, and continues after the last data that the driver received.
"""

import base64
import logging
import queue
import secrets
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from pipelines.launch.wire.handshake import SECRET_BYTES, accept_task, hang_up
from pipelines.launch.wire.messages import (
    MAXIMUM_LINE_BYTES,
    Alive,
    Back,
    Event,
    Gone,
    Log,
    Numbered,
    Opening,
    Order,
    Received,
    Replaced,
    ResultPart,
    Stop,
    Welcome,
    decode,
    encode,
)

MAXIMUM_STRANGERS = 256
"""Limit to connections that have not proved the secret yet; newer ones replace older ones."""
QUEUED_EVENTS = 1000
"""Largest number of events that wait for the driver."""
_SECONDS_BETWEEN_TRIES = 1.0
_PAUSE_SECONDS = 0.1
"""Seconds between two attempts to accept a connection."""
_MESSAGES_PER_RECEIPT = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChannelAddress:
    """The address on which the driver listens, and the secret that a task has to prove."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class ResultLostError(RuntimeError):
    """The error when a return value did not reach the driver."""


@dataclass
class _Peer:
    """The channel's state of one task, over all its connections."""

    link: str
    connection: socket.socket
    number: int = 0
    log_bytes: int = 0
    result_bytes: int = 0
    result: IO[bytes] | None = None
    result_error: str = ""
    orders: list[bytes] = field(default_factory=list)
    """All orders to the task; a new connection may have to send them again."""
    has_hello: bool = False
    """Whether the driver has received the task's first message."""
    seen: float = field(default_factory=time.monotonic)
    sending: threading.Lock = field(default_factory=threading.Lock)
    taking: threading.Lock = field(default_factory=threading.Lock)
    """The lock for handling received data, because an earlier connection may still have unread bytes."""

    def send(self, message: Received) -> None:
        with self.sending:
            self.connection.sendall(encode(message))

    def order(self, order: Order) -> None:
        """Send an order now or over the next connection."""
        with self.sending:
            self.orders.append(encode(order, len(self.orders) + 1))
            with suppress(OSError):
                self.connection.sendall(self.orders[-1])

    def talk_over(self, connection: socket.socket, orders_received: int) -> None:
        """Use a new connection: send how much has arrived here, and the orders that have not arrived there."""
        with self.taking, self.sending:  # from here on, data of the previous connection is ignored
            self.seen, self.connection = time.monotonic(), connection
            welcome = encode(Welcome(self.number, self.log_bytes, self.result_bytes))
            connection.sendall(welcome + b"".join(self.orders[orders_received:]))

    def take(self, part: ResultPart) -> None:
        """Append a part of the return value to a file without a name."""
        data = base64.b64decode(part.data)
        if part.offset != self.result_bytes:
            return
        self.result_bytes += len(data)
        if self.result_error:
            return
        try:
            if self.result is None:
                self.result = tempfile.TemporaryFile()  # noqa: SIM115  open until the channel is closed
            self.result.write(data)
        except OSError as error:
            self.result_error = f"the driver cannot keep it in {tempfile.gettempdir()} (TMPDIR): {error}"


class DriverChannel:
    """The driver's end: `events` contains `(task, event)` in order of arrival.

    A task that Spark has started a second time gets the order to stop, and its event is `Replaced`. The queue is
    bounded: a slow driver slows down the connections, but never the ranks.
    """

    def __init__(self, host: str, bind: str | None = None) -> None:
        """Bind a random port and serve until `close`.

        Args:
            host: Address of the driver for the tasks.
            bind: Address to listen on, if it is not `host`.
        """
        self._listener = socket.create_server((bind or host, 0), backlog=1024)
        self.address = ChannelAddress(host, self._listener.getsockname()[1], secrets.token_bytes(SECRET_BYTES))
        self.events: queue.Queue[tuple[int, Event]] = queue.Queue(QUEUED_EVENTS)
        self.peers: set[str] = set()
        """The addresses from which tasks have proved the secret."""
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._refused = 0
        self._tasks: dict[int, _Peer] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, name="groundswell-channel", daemon=True).start()

    def send(self, task: int, order: Order) -> None:
        """Send an order to a task that has connected; after a broken connection, the next one delivers it."""
        if task in self._tasks:
            self._tasks[task].order(order)

    def seconds_silent(self, task: int) -> float:
        """Return the seconds since the task's last sign of life; tasks send one every two seconds."""
        return time.monotonic() - self._tasks[task].seen

    def result(self, task: int) -> IO[bytes]:
        """Return the pickled return value that the task has sent, at its beginning.

        Raises:
            ResultLostError: Nothing has arrived, or the driver could not store it.
        """
        peer = self._tasks[task]
        if peer.result is None or peer.result_error:
            raise ResultLostError(f"its return value was lost: {peer.result_error or 'nothing has arrived'}")
        peer.result.seek(0)
        return peer.result

    def close(self) -> None:
        """Stop listening, hang up and delete the return values."""
        self._is_closed = True
        # A thread that waits in `accept` keeps a closed socket open; this wakes the thread.
        hang_up(self._listener)
        self._listener.close()
        with self._lock:
            connections = [*(peer.connection for peer in self._tasks.values()), *self._strangers]
        for connection in connections:
            hang_up(connection)
        for peer in self._tasks.values():
            if peer.result is not None:
                peer.result.close()
        if self._refused:
            _log.warning("refused %d connections that did not know the secret of this run", self._refused)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed, or this process has no free descriptor for a moment
                if self._is_closed:
                    return
                time.sleep(_PAUSE_SECONDS)
                continue
            with self._lock:
                self._strangers[connection] = None
                # Silent connections are closed in favour of new ones: a task proves the secret within milliseconds.
                if len(self._strangers) > MAXIMUM_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    hang_up(oldest)
            threading.Thread(target=self._serve, args=(connection, address[0]), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with connection:
            try:
                proved = accept_task(connection, self.address.secret)
            except OSError:
                proved = False
            with self._lock:
                self._strangers.pop(connection, None)
                if not proved:
                    self._refused += 1
                    return
                self.peers.add(address)
            try:
                self._talk(connection)
            except (OSError, ValueError) as error:
                _log.info("a connection of the channel ended: %s", error)

    def _talk(self, connection: socket.socket) -> None:
        lines = connection.makefile("rb")
        opening, _ = decode(lines.readline(MAXIMUM_LINE_BYTES))
        if not isinstance(opening, Opening):
            raise ValueError(f"a {type(opening).__name__} came before the opening")
        task = opening.hello.task
        with self._lock:
            peer = self._tasks.setdefault(task, _Peer(opening.link, connection))
        if peer.link != opening.link:
            connection.sendall(encode(Welcome(0, 0, 0)) + encode(Stop(), 1))
            self._tell((task, Replaced()))
            return
        peer.talk_over(connection, opening.orders)
        with peer.taking:
            event, peer.has_hello = Back() if peer.has_hello else opening.hello, True
            self._tell((task, event))
        try:
            while line := lines.readline(MAXIMUM_LINE_BYTES):
                with peer.taking:
                    if peer.connection is not connection:  # the task sends the data again over its new connection
                        return
                    receipt = self._take(task, peer, line)
                if receipt:
                    peer.send(Received(peer.number, peer.log_bytes, peer.result_bytes))
        finally:
            if peer.connection is connection:
                self._tell((task, Gone()))

    def _tell(self, event: tuple[int, Event]) -> None:
        """Put an event into the queue; while it is full, wait for space or for the end of the channel."""
        while not self._is_closed:
            with suppress(queue.Full):
                self.events.put(event, timeout=_SECONDS_BETWEEN_TRIES)
                return

    def _take(self, task: int, peer: _Peer, line: bytes) -> bool:
        """Handle one message; return whether the task needs a receipt."""
        message, number = decode(line)
        receipt = isinstance(message, Alive | ResultPart)
        if isinstance(message, Log) and message.offset == peer.log_bytes:
            peer.log_bytes = message.end
            self._tell((task, message))
        elif isinstance(message, ResultPart):
            peer.take(message)
        elif isinstance(message, Numbered) and number > peer.number:
            peer.number = number
            self._tell((task, message))
            receipt = number % _MESSAGES_PER_RECEIPT == 0
        peer.seen = time.monotonic()
        return receipt
