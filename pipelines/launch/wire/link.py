"""The task's end of its connection to the driver; `channel` has the other end.

The rank never waits for the driver. If the driver cannot be reached, the run continues and only the view is lost.
"""

import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from contextlib import closing, suppress
from itertools import islice
from typing import IO

from pipelines.launch.rank.rank_log import RankLog
from pipelines.launch.wire.channel import ChannelAddress
from pipelines.launch.wire.encoding import encode
from pipelines.launch.wire.messages import (
    RESULT_PART_BYTES,
    Heartbeat,
    Hello,
    LogPart,
    MessagesDropped,
    NumberedMessage,
    Opening,
    Order,
    Receipt,
    Report,
    ResultPart,
    ShownLine,
    StepDone,
    Stop,
    Welcome,
    decode,
)
from pipelines.launch.wire.transport import HANDSHAKE_SECONDS, FrameConnection, connect, frame

RECONNECT_SECONDS = 1.0
"""Seconds between two attempts to connect."""
_HEARTBEAT_SECONDS = 2.0
_LOOK_SECONDS = 0.01
LOG_PERIOD_SECONDS = 0.05
LOG_BYTES_PER_PERIOD = 1 << 18
"""Largest part of a rank's log that is sent in `LOG_PERIOD_SECONDS`: 5 MiB/s."""
_MESSAGE_BYTES_AT_ONCE = 1 << 20
MAXIMUM_UNRECEIVED_BYTES = 1 << 26
"""Limit to messages that the driver has not received: 64 MiB."""
_log = logging.getLogger(__name__)


class TaskLink:
    """Sends messages, the rank's log and its return value from one thread, and receives orders in another."""

    def __init__(self, address: ChannelAddress, hello: Hello, log: RankLog) -> None:
        """Start connecting.

        Args:
            address: Address of the driver.
            hello: The first message.
            log: Log of the rank, sent while it grows, at a bounded rate.
        """
        self.orders: queue.Queue[Order] = queue.Queue()
        self.connected = False
        self._dismissed = False
        self._address, self._log = address, log
        self._name, self._hello = secrets.token_hex(8), hello
        self._orders_received = 0
        self._lock = threading.Lock()
        self._unreceived: deque[tuple[int, bytes]] = deque()
        self._unreceived_bytes = self._dropped = 0
        self._last_number = 0
        self._next_number = 1
        self._log_offset = self._log_received = 0
        self._result: IO[bytes] | None = None
        self._result_bytes = self._result_offset = self._result_received = 0
        self._asks_receipt = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="groundswell-link", daemon=True)
        self._thread.start()

    def send(self, message: NumberedMessage) -> None:
        """Queue one message.

        Messages arrive in order and only once, over any number of connections. The link stores at most 64 MiB of them
        until the driver has received them. Further reports and lines are dropped, and the driver gets their number.
        """
        with self._lock:
            if (
                isinstance(message, Report | ShownLine | StepDone)
                and self._unreceived_bytes >= MAXIMUM_UNRECEIVED_BYTES
            ):
                self._dropped += not isinstance(message, StepDone)
                return
            if self._dropped:
                self._enqueue(MessagesDropped(self._dropped))
                self._dropped = 0
            self._enqueue(message)
        self._wake.set()

    def send_result(self, file: IO[bytes], seconds: float) -> bool:
        """Send a pickled return value; return whether the driver has received all of it.

        Args:
            file: File with the value, read from its beginning.
            seconds: Seconds to wait until the next part is received, or for a connection.
        """
        self._result_bytes = os.fstat(file.fileno()).st_size
        self._result = file
        self._wake.set()
        received, deadline = -1, 0.0
        while self._result_received < self._result_bytes:
            if received != (received := self._result_received):
                deadline = time.monotonic() + seconds
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def flush(self, seconds: float, *, reconnect: float = 0.0) -> None:
        """Wait until the driver has received messages and log, while there is a connection.

        Args:
            seconds: Seconds to wait with a connection.
            reconnect: Seconds to wait for a connection if there is none.

        Closing a connection loses data that is sent but not received: the kernel discards it when the driver answers.
        """
        began = time.monotonic()
        deadline = began + seconds
        self._asks_receipt = True
        self._wake.set()
        while time.monotonic() < deadline:
            if not self.connected:
                # The driver hangs up at the end of an attempt, and then accepts no new connection.
                if self._dismissed or time.monotonic() > began + reconnect:
                    return
                deadline = time.monotonic() + seconds
            elif not self._unreceived and self._log_received >= self._log.size():
                return
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Hang up."""
        self._closing.set()
        self._wake.set()
        self._thread.join(HANDSHAKE_SECONDS)

    def _enqueue(self, message: NumberedMessage) -> None:
        self._last_number += 1
        line = frame(encode(message, self._last_number))
        self._unreceived.append((self._last_number, line))
        self._unreceived_bytes += len(line)

    def _remove_received(self, received: Receipt) -> None:
        self._log_received, self._result_received = received.log_bytes, received.result_bytes
        with self._lock:
            while self._unreceived and self._unreceived[0][0] <= received.number:
                self._unreceived_bytes -= len(self._unreceived.popleft()[1])

    def _run(self) -> None:
        warned = False
        while not self._closing.is_set():
            try:
                with closing(connect(self._address.host, self._address.port, self._address.secret)) as connection:
                    self._talk(connection)
            except (OSError, ValueError) as error:
                if not (warned or self._dismissed) and self._last_number:
                    warned = True
                    _log.warning("the channel to the driver broke (%s); the run continues without it", error)
            self.connected = False
            self._closing.wait(RECONNECT_SECONDS)

    def _talk(self, connection: FrameConnection) -> None:
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.send(frame(encode(Opening(self._name, self._hello, self._orders_received))))
        welcome, _ = decode(connection.receive()[0])
        if not isinstance(welcome, Welcome):
            raise ValueError(f"a {type(welcome).__name__} came before the welcome")
        self._remove_received(welcome)
        self._next_number = welcome.number + 1
        self._log_offset, self._result_offset = welcome.log_bytes, welcome.result_bytes
        connection.settimeout(None)
        self.connected = True
        listener = threading.Thread(target=self._listen, args=(connection,), daemon=True)
        listener.start()
        last_sent = time.monotonic()
        try:
            while not self._closing.is_set() and listener.is_alive():
                self._wake.wait(LOG_PERIOD_SECONDS)
                self._wake.clear()
                log_offset = self._log_offset
                data = self._next_log() + self._next_result() + self._next_messages()
                if not data and (self._asks_receipt or time.monotonic() - last_sent > _HEARTBEAT_SECONDS):
                    self._asks_receipt = False
                    data = frame(encode(Heartbeat()))  # the driver answers with the amount that it has received
                if data:
                    connection.send(data)
                    last_sent = time.monotonic()
                if self._log_offset - log_offset > LOG_BYTES_PER_PERIOD // 2:
                    # Messages wake this loop, but a growing log must not.
                    self._closing.wait(LOG_PERIOD_SECONDS)
        finally:
            connection.hang_up()
            # The driver may have sent its last order before it hung up; this thread may notice the end first.
            listener.join(HANDSHAKE_SECONDS)

    def _next_log(self) -> bytes:
        """Return the next part of the log; it is sent first, so that the log never arrives after later messages."""
        offset = self._log_offset
        lines, self._log_offset = self._log.read(offset, LOG_BYTES_PER_PERIOD)
        return frame(encode(LogPart(offset, self._log_offset, lines))) if self._log_offset > offset else b""

    def _next_result(self) -> bytes:
        if self._result is None or self._result_offset >= self._result_bytes:
            return b""
        data = os.pread(self._result.fileno(), RESULT_PART_BYTES, self._result_offset)
        part = frame(encode(ResultPart(self._result_offset)), len(data)) + data
        self._result_offset += len(data)
        self._wake.set()
        return part

    def _next_messages(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        with self._lock:
            sent = self._next_number - self._unreceived[0][0] if self._unreceived else 0
            for number, line in islice(self._unreceived, max(0, sent), None):
                if size >= _MESSAGE_BYTES_AT_ONCE:
                    self._wake.set()
                    break
                parts.append(line)
                size += len(line)
                self._next_number = number + 1
        return b"".join(parts)

    def _listen(self, connection: FrameConnection) -> None:
        with suppress(OSError, ValueError):
            while True:
                message, number = decode(connection.receive()[0])
                if isinstance(message, Receipt):
                    self._remove_received(message)
                elif isinstance(message, Order) and number > self._orders_received:
                    self._orders_received = number
                    self._dismissed |= isinstance(message, Stop)
                    self.orders.put(message)
        # The driver has hung up. The other thread may wait for space in the socket. The kernel would continue to
        # ask the driver for it, less and less often, for up to two minutes.
        connection.hang_up()
