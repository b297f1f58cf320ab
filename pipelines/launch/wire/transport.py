"""Connections between the processes of one run, for the driver's channel and for the shards of a parameter server.

Both ends first prove that they know the secret of the run, and neither sends it. Then they exchange frames. A frame is
a message and the bytes of its data, such as an array, which is sent and received without being copied.
"""

import hmac
import logging
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress

from pipelines.launch.wire.encoding import MAXIMUM_MESSAGE_BYTES

HANDSHAKE_SECONDS = 5.0
"""Seconds to connect, and seconds that one end waits for the other end's proof."""
SECRET_BYTES = 32
MAXIMUM_STRANGERS = 256
"""Limit to connections that have not proved the secret yet; newer ones replace older ones."""
_LENGTHS = struct.Struct("!IQ")
"""The head of a frame: number of bytes of its message and of its data."""
_PARTS_AT_ONCE = 512
"""Number of parts in one call of the kernel, which takes 1,024 at most."""
_PAUSE_SECONDS = 0.1
"""Seconds between two attempts to accept a connection."""
_log = logging.getLogger(__name__)


def frame(message: bytes, data_bytes: int = 0) -> bytes:
    """Return a message with the head of its frame; the sender sends the `data_bytes` bytes of its data after it."""
    return _LENGTHS.pack(len(message), data_bytes) + message


class FrameConnection:
    """One end of a connection: it proves the secret, or accepts the proof, and then sends and receives frames."""

    def __init__(self, connection: socket.socket, maximum_data_bytes: int = 0) -> None:
        """Take over a socket.

        Args:
            connection: The socket.
            maximum_data_bytes: Limit to the data of a received frame.
        """
        self._socket, self._maximum_data_bytes = connection, maximum_data_bytes
        self._data = bytearray()
        self._deadline = math.inf
        """Time at which the other end must have sent all that is awaited, whatever it sends until then."""

    def accept_proof(self, secret: bytes) -> bool:
        """Run the server's part of the handshake; return whether the other end knows the secret.

        Raises:
            OSError: The other end is silent or hangs up.
        """
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS
        nonce = secrets.token_bytes(SECRET_BYTES)
        self.send(nonce)
        theirs, proof = self._exactly(SECRET_BYTES), self._exactly(SECRET_BYTES)
        if not hmac.compare_digest(proof, hmac.digest(secret, b"client" + nonce + theirs, "sha256")):
            return False
        self.send(hmac.digest(secret, b"server" + theirs + nonce, "sha256"))
        self._end_handshake()
        return True

    def prove(self, secret: bytes) -> None:
        """Run the client's part of the handshake.

        Raises:
            ConnectionError: The other end does not know the secret.
        """
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS
        theirs = self._exactly(SECRET_BYTES)
        nonce = secrets.token_bytes(SECRET_BYTES)
        self.send(nonce + hmac.digest(secret, b"client" + theirs + nonce, "sha256"))
        proof = self._exactly(SECRET_BYTES)
        if not hmac.compare_digest(proof, hmac.digest(secret, b"server" + nonce + theirs, "sha256")):
            raise ConnectionError("the process at the other end does not know the secret of this run")
        self._end_handshake()

    def _end_handshake(self) -> None:
        self._deadline = math.inf
        self.settimeout(None)

    def send(self, frames: bytes, data: Iterable[memoryview] = ()) -> None:
        """Send whole frames, or one frame without its data and then the parts of this data, as views of bytes."""
        parts = [memoryview(frames), *data]
        while parts:
            sent = self._socket.sendmsg(parts[:_PARTS_AT_ONCE])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def receive(self) -> tuple[bytes, memoryview]:
        """Return the next message and its data; the data is valid until the next frame with data.

        Raises:
            ConnectionError: The other end has hung up.
            ValueError: The frame is larger than allowed.
        """
        message_bytes, data_bytes = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
        message = self._exactly(_within(message_bytes, MAXIMUM_MESSAGE_BYTES))
        if len(self._data) < _within(data_bytes, self._maximum_data_bytes):
            self._data = bytearray(data_bytes)
        data = memoryview(self._data)[:data_bytes]
        self._fill(data)
        return message, data

    def settimeout(self, seconds: float | None) -> None:
        """Limit the seconds that the other end may be silent, as for sockets; None: no limit."""
        self._socket.settimeout(seconds)

    def hang_up(self) -> None:
        """End the connection, and wake the thread that waits in it."""
        hang_up(self._socket)

    def close(self) -> None:
        """Free the socket; no other thread uses it any more."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, data: memoryview) -> None:
        while data:
            if self._deadline < math.inf:
                self._socket.settimeout(max(1e-3, self._deadline - time.monotonic()))
            received = self._socket.recv_into(data, 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("the other end hung up")
            data = data[received:]


def _within(size: int, maximum: int) -> int:
    if size > maximum:
        raise ValueError(f"a part of a frame has {size:,} bytes, and {maximum:,} are allowed")
    return size


class ConnectionServer:
    """Accepts connections on a port of its own, and serves each one that proves the secret in its own thread."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        serve: Callable[[FrameConnection], None],
        *,
        maximum_data_bytes: int,
        name: str,
    ) -> None:
        """Bind a random port and serve until `close`.

        Args:
            host: The address to listen on.
            secret: The secret of the run.
            serve: Called with each connection that has proved the secret; the connection ends with the call.
            maximum_data_bytes: Limit to the data of a received frame.
            name: Name of the threads.
        """
        self._secret, self._serve_proved = secret, serve
        self._maximum_data_bytes, self._name = maximum_data_bytes, name
        self.peers: set[str] = set()
        """The addresses that have proved the secret."""
        self.refused = 0
        """Number of connections that did not prove the secret."""
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._proved: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit this
        self.port: int = self._listener.getsockname()[1]
        accept_connections(self._listener, self._begin, name)

    def close(self) -> None:
        """Stop listening, and hang up."""
        stop_listening(self._listener)
        with self._lock:
            for connection in (*self._strangers, *self._proved):
                hang_up(connection)

    def _begin(self, connection: socket.socket, address: str) -> None:
        with self._lock:
            self._strangers[connection] = None
            # Silent connections are closed in favour of new ones: our own ends prove the secret in milliseconds.
            if len(self._strangers) > MAXIMUM_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                hang_up(oldest)
        if self._listener.fileno() < 0:  # `close` may have missed this connection
            hang_up(connection)
        threading.Thread(target=self._serve, args=(connection, address), name=self._name, daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with closing(FrameConnection(connection, self._maximum_data_bytes)) as frames:
            try:
                proved = frames.accept_proof(self._secret)
            except OSError:
                proved = False
            with self._lock:
                self._strangers.pop(connection, None)
                if not proved:
                    self.refused += 1
                    return
                self._proved.add(connection)
                self.peers.add(address)
            try:
                self._serve_proved(frames)
            except (OSError, ValueError) as error:
                _log.info("a connection of %s ended: %s", self._name, error)
            finally:
                with self._lock:
                    self._proved.remove(connection)


def accept_connections(listener: socket.socket, take: Callable[[socket.socket, str], None], name: str) -> None:
    """Accept connections in a thread until `stop_listening`.

    Args:
        listener: The listening socket.
        take: Called with each connection and the address of its other end.
        name: Name of the thread.
    """

    def accept() -> None:
        while listener.fileno() >= 0:
            try:
                connection, address = listener.accept()
            except OSError:  # closed, or this process has no free descriptor for a moment
                time.sleep(_PAUSE_SECONDS)
            else:
                take(connection, address[0])

    threading.Thread(target=accept, name=name, daemon=True).start()


def stop_listening(listener: socket.socket) -> None:
    """Close a listening socket, and end the thread that accepts its connections."""
    hang_up(listener)  # a thread that waits in `accept` keeps a closed socket open
    listener.close()


def connect(host: str, port: int, secret: bytes, maximum_data_bytes: int = 0) -> FrameConnection:
    """Connect to a `ConnectionServer`.

    Args:
        host: The server's address.
        port: The server's port.
        secret: The secret of the run.
        maximum_data_bytes: Limit to the data of a received frame.

    Raises:
        ConnectionError: The other end does not know the secret.
        OSError: The server cannot be reached.
    """
    connected = socket.create_connection((host, port), HANDSHAKE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = FrameConnection(connected, maximum_data_bytes)
    try:
        connection.prove(secret)
    except BaseException:
        connection.close()
        raise
    return connection


def hang_up(connection: socket.socket) -> None:
    """Shut down a connection or a listener, and so wake the thread that waits in it; a second call does nothing."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
