"""Frames between both ends of a connection, in this process."""

import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from pipelines.launch.wire import transport
from pipelines.launch.wire.transport import ConnectionServer, FrameConnection, connect, frame
from tests.patience import patient, wait_until

pytestmark = pytest.mark.timeout(60)

SECRET = secrets.token_bytes(32)
LARGEST = 1 << 24


class Echo:
    """A server that sends each frame back."""

    def __init__(self, name: str = "echo") -> None:
        self.served: queue.Queue[FrameConnection] = queue.Queue()
        self.server = ConnectionServer("127.0.0.1", SECRET, self.serve, maximum_data_bytes=LARGEST, name=name)

    def serve(self, connection: FrameConnection) -> None:
        self.served.put(connection)
        while True:
            message, data = connection.receive()
            connection.send(frame(message, len(data)), [data])

    def connect(self, maximum_data_bytes: int = LARGEST) -> FrameConnection:
        return connect("127.0.0.1", self.server.port, SECRET, maximum_data_bytes)


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    with closing(echo.server):
        yield echo


def test_a_head_has_the_same_size_on_every_machine() -> None:
    assert frame(b"ab", 258) == bytes([0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1, 2]) + b"ab"


def test_messages_and_data_of_every_size_arrive_as_they_were_sent(echo: Echo) -> None:
    with closing(echo.connect()) as connection:
        for size in (0, 1, 8191, 8192, 8193, LARGEST, 5):
            data = secrets.token_bytes(size)
            connection.send(frame(b"message", size), [memoryview(data)[:3], memoryview(data)[3:]])
            message, received = connection.receive()
            assert (message, bytes(received)) == (b"message", data)


def test_thousands_of_parts_arrive_in_order(echo: Echo) -> None:
    parts = [secrets.token_bytes(number % 100) for number in range(3000)]
    whole = b"".join(parts)
    with closing(echo.connect()) as connection:
        connection.send(frame(b"message", len(whole)), map(memoryview, parts))
        assert bytes(connection.receive()[1]) == whole


def test_data_stays_valid_until_there_is_new_data(echo: Echo) -> None:
    with closing(echo.connect()) as connection:
        connection.send(frame(b"with", 3) + b"abc" + frame(b"without"))
        _, data = connection.receive()
        connection.receive()
        assert bytes(data) == b"abc"


@pytest.mark.parametrize("lengths", [frame(b"", LARGEST + 1), b"\xff" * 12])
def test_a_larger_frame_than_allowed_ends_the_connection_before_it_is_received(echo: Echo, lengths: bytes) -> None:
    with closing(echo.connect()) as connection:
        connection.send(lengths)
        with pytest.raises(ConnectionError):
            connection.receive()


def test_a_client_has_a_limit_of_its_own(echo: Echo) -> None:
    with closing(echo.connect(maximum_data_bytes=2)) as connection:
        connection.send(frame(b"", 3) + b"abc")
        with pytest.raises(ValueError, match="a part of a frame has 3 bytes, and 2 are allowed"):
            connection.receive()


def test_an_end_in_the_middle_of_a_frame_is_an_error(echo: Echo) -> None:
    with closing(echo.connect()) as connection:
        served = echo.served.get(timeout=patient(20))
        served.send(frame(b"message", 10)[:-2])
        served.hang_up()
        with pytest.raises(ConnectionError, match="hung up"):
            connection.receive()


def test_who_does_not_know_the_secret_is_counted_and_not_served(echo: Echo) -> None:
    with pytest.raises(ConnectionError):
        connect("127.0.0.1", echo.server.port, secrets.token_bytes(32))
    wait_until(lambda: echo.server.refused == 1)
    assert (echo.served.empty(), echo.server.peers) == (True, set())


def test_a_server_without_the_secret_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        thread = threading.Thread(target=lambda: impostor.accept()[0].sendall(bytes(64)))
        thread.start()
        with pytest.raises(ConnectionError):
            connect("127.0.0.1", impostor.getsockname()[1], SECRET)
        thread.join()


def test_silent_strangers_keep_nobody_out(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.launch.wire.transport.MAXIMUM_STRANGERS", 5)
    with ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(socket.create_connection(("127.0.0.1", echo.server.port)))
        with closing(echo.connect()) as connection:
            connection.send(frame(b"message"))
            assert connection.receive()[0] == b"message"
        wait_until(lambda: echo.server.refused >= 15)


def test_a_closed_server_hangs_up_and_its_threads_end() -> None:
    def threads() -> int:
        return sum(thread.name == "closed server" for thread in threading.enumerate())

    echo = Echo("closed server")
    with closing(echo.connect()) as connection, socket.create_connection(("127.0.0.1", echo.server.port)) as stranger:
        echo.served.get(timeout=patient(20))
        wait_until(lambda: threads() == 3)  # one listens, and one serves each connection
        echo.server.close()
        with pytest.raises(ConnectionError):
            connection.receive()
        stranger.settimeout(patient(20))
        while stranger.recv(64):
            time.sleep(0.01)
    wait_until(lambda: threads() == 0)
    with pytest.raises(OSError, match="refused"):
        echo.connect()


@pytest.mark.long
def test_a_stranger_that_sends_a_byte_now_and_then_has_no_more_time_than_a_silent_one(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", echo.server.port)) as stranger:
        for _ in range(40):  # the proof has 64 bytes
            with suppress(OSError):
                stranger.sendall(b"x")
            time.sleep(0.1)
        assert echo.server.refused == 1
