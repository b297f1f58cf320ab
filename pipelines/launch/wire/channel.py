"""The driver's end of the connections to its tasks; `link` has the other end.

A task whose connection breaks connects again, and continues after the last data that the driver received.
"""

import logging
import queue
import secrets
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from pipelines.launch.wire.encoding import encode
from pipelines.launch.wire.messages import (
    RESULT_PART_BYTES,
    Disconnected,
    Event,
    Heartbeat,
    LogPart,
    NumberedMessage,
    Opening,
    Order,
    Receipt,
    Reconnected,
    ResultPart,
    Stop,
    TaskRestarted,
    Welcome,
    decode,
)
from pipelines.launch.wire.transport import SECRET_BYTES, ConnectionServer, FrameConnection, frame
from pipelines.machine.proc import folder_of

QUEUED_EVENTS = 1000
"""Largest number of events that wait for the driver."""
_SECONDS_BETWEEN_TRIES = 1.0
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
    connection: FrameConnection
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

    def order(self, order: Order) -> None:
        """Send an order now or over the next connection."""
        with self.sending:
            self.orders.append(frame(encode(order, len(self.orders) + 1)))
            with suppress(OSError):
                self.connection.send(self.orders[-1])

    def talk_over(self, connection: FrameConnection, orders_received: int) -> None:
        """Use a new connection: send how much has arrived here, and the orders that have not arrived there."""
        with self.taking, self.sending:  # from here on, data of the previous connection is ignored
            self.seen, self.connection = time.monotonic(), connection
            welcome = frame(encode(Welcome(self.number, self.log_bytes, self.result_bytes)))
            connection.send(welcome + b"".join(self.orders[orders_received:]))

    def take(self, data: memoryview) -> None:
        """Append the next part of the return value to a file without a name."""
        self.result_bytes += len(data)
        if self.result_error:
            return
        try:
            if self.result is None:
                self.result = tempfile.TemporaryFile()  # noqa: SIM115  open until the channel is closed
            self.result.write(data)
        except OSError as error:
            place = "a temporary folder" if self.result is None else folder_of(self.result.fileno())
            self.result_error = f"the driver cannot keep it in {place} (TMPDIR): {error}"


class DriverChannel:
    """The driver's end: `events` contains `(task, event)` in order of arrival.

    A task that Spark has started a second time gets the order to stop, and its event is `TaskRestarted`. The queue is
    bounded: a slow driver slows down the connections, but never the ranks.
    """

    def __init__(self, host: str, bind: str | None = None) -> None:
        """Bind a random port and serve until `close`.

        Args:
            host: Address of the driver for the tasks.
            bind: Address to listen on, if it is not `host`.
        """
        self.events: queue.Queue[tuple[int, Event]] = queue.Queue(QUEUED_EVENTS)
        self._lock = threading.Lock()
        self._tasks: dict[int, _Peer] = {}
        self._is_closed = False
        secret = secrets.token_bytes(SECRET_BYTES)
        self._server = ConnectionServer(
            bind or host, secret, self._talk, maximum_data_bytes=RESULT_PART_BYTES, name="groundswell-channel"
        )
        self.address = ChannelAddress(host, self._server.port, secret)
        self.peers = self._server.peers
        """The addresses from which tasks have proved the secret."""

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
        self._server.close()
        for peer in self._tasks.values():
            if peer.result is not None:
                peer.result.close()
        if self._server.refused:
            _log.warning("refused %d connections that did not know the secret of this run", self._server.refused)

    def _talk(self, connection: FrameConnection) -> None:
        opening, _ = decode(connection.receive()[0])
        if not isinstance(opening, Opening):
            raise ValueError(f"a {type(opening).__name__} came before the opening")
        task = opening.hello.task
        with self._lock:
            peer = self._tasks.setdefault(task, _Peer(opening.link, connection))
        if peer.link != opening.link:
            connection.send(frame(encode(Welcome(0, 0, 0))) + frame(encode(Stop(), 1)))
            self._tell((task, TaskRestarted()))
            return
        peer.talk_over(connection, opening.orders)
        with peer.taking:
            event, peer.has_hello = Reconnected() if peer.has_hello else opening.hello, True
            self._tell((task, event))
        try:
            while True:
                message, data = connection.receive()
                with peer.taking:
                    if peer.connection is not connection:  # the task sends the data again over its new connection
                        return
                    receipt = self._take(task, peer, message, data)
                if receipt:
                    with peer.sending:
                        peer.connection.send(frame(encode(Receipt(peer.number, peer.log_bytes, peer.result_bytes))))
        finally:
            if peer.connection is connection:
                self._tell((task, Disconnected()))

    def _tell(self, event: tuple[int, Event]) -> None:
        """Put an event into the queue; while it is full, wait for space or for the end of the channel."""
        while not self._is_closed:
            with suppress(queue.Full):
                self.events.put(event, timeout=_SECONDS_BETWEEN_TRIES)
                return

    def _take(self, task: int, peer: _Peer, received: bytes, data: memoryview) -> bool:
        """Handle one message; return whether the task needs a receipt."""
        message, number = decode(received)
        receipt = isinstance(message, Heartbeat | ResultPart)
        if isinstance(message, LogPart) and message.offset == peer.log_bytes:
            peer.log_bytes = message.end
            self._tell((task, message))
        elif isinstance(message, ResultPart) and message.offset == peer.result_bytes:
            peer.take(data)
        elif isinstance(message, NumberedMessage) and number > peer.number:
            peer.number = number
            self._tell((task, message))
            receipt = number % _MESSAGES_PER_RECEIPT == 0
        peer.seen = time.monotonic()
        return receipt
