import dataclasses
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pipelines.launch.channel import ChannelAddress, DriverChannel, Message, Sender


@pytest.fixture
def received() -> list[Message]:
    return []


@pytest.fixture
def channel(received: list[Message]) -> Iterator[DriverChannel]:
    channel = DriverChannel("127.0.0.1", received.append)
    yield channel
    channel.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "waited for 5 s"
        time.sleep(0.01)


def test_messages_arrive_whole_and_in_order(channel: DriverChannel, received: list[Message]) -> None:
    sender = Sender(channel.address)
    sent = [{"kind": "log", "line": f'line {i} äöü\n\t"{"x" * (i * 50)}'} for i in range(200)]
    for message in sent:
        sender.send(message)
    wait_until(lambda: len(received) == len(sent))
    assert received == sent
    sender.close()


def test_it_listens_on_its_address_only(channel: DriverChannel) -> None:
    assert channel._server.server_address[0] == "127.0.0.1"


def test_a_wrong_secret_is_refused(channel: DriverChannel, received: list[Message]) -> None:
    stranger = Sender(dataclasses.replace(channel.address, secret=secrets.token_bytes(32)))
    for _ in range(10):
        stranger.send({"kind": "log", "line": "let me in"})
        time.sleep(0.01)
    stranger.close()
    known = Sender(channel.address)
    known.send({"kind": "log", "line": "hello"})
    wait_until(lambda: bool(received))
    assert received == [{"kind": "log", "line": "hello"}]
    known.close()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), json.dumps({"kind": "log"}).encode()])
def test_strangers_without_the_secret_reach_nothing(
    channel: DriverChannel, received: list[Message], noise: bytes
) -> None:
    for _ in range(50):
        with socket.create_connection((channel.address.host, channel.address.port)) as stranger:
            stranger.sendall(noise)
    known = Sender(channel.address)
    known.send({"kind": "log", "line": "still here"})
    wait_until(lambda: bool(received))
    assert received == [{"kind": "log", "line": "still here"}]
    known.close()


def test_a_silent_stranger_keeps_nobody_out(channel: DriverChannel, received: list[Message]) -> None:
    with socket.create_connection((channel.address.host, channel.address.port)):
        known = Sender(channel.address)
        known.send({"kind": "log", "line": "hello"})
        wait_until(lambda: bool(received))
        known.close()
    assert received[0]["line"] == "hello"


def test_a_channel_that_dies_does_not_stop_the_sender(channel: DriverChannel, caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender(channel.address)
    sender._socket.shutdown(socket.SHUT_RDWR)
    for _ in range(3):
        sender.send({"kind": "log", "line": "into the void"})
    sender.close()
    assert len([record for record in caplog.records if "goes on without it" in record.message]) == 1


def test_closing_waits_for_what_was_sent() -> None:
    received: list[Message] = []

    def slow(message: Message) -> None:
        time.sleep(0.005)
        received.append(message)

    channel = DriverChannel("127.0.0.1", slow)
    sender = Sender(channel.address)
    for number in range(300):
        sender.send({"kind": "log", "line": str(number)})
    sender.close()
    channel.close()
    assert [message["line"] for message in received] == [str(number) for number in range(300)]


def test_a_callback_that_raises_costs_one_message(caplog: pytest.LogCaptureFixture) -> None:
    received: list[str] = []

    def picky(message: Message) -> None:
        if message["line"] == "bad":
            raise KeyError("bad")
        received.append(message["line"])

    channel = DriverChannel("127.0.0.1", picky)
    sender = Sender(channel.address)
    for line in ("one", "bad", "two"):
        sender.send({"kind": "log", "line": line})
    sender.close()
    channel.close()
    assert received == ["one", "two"]
    assert "callback of the log channel failed" in caplog.text


def test_a_driver_that_does_not_listen_costs_log_lines_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.launch.channel._QUEUED_MESSAGES", 10)
    go_on = threading.Event()
    received: list[Message] = []

    def stuck(message: Message) -> None:
        go_on.wait()
        received.append(message)

    channel = DriverChannel("127.0.0.1", stuck)
    sender = Sender(channel.address)
    started = time.monotonic()
    for number in range(200):
        sender.send({"kind": "log", "line": f"{number} " + "x" * 100_000})
    assert time.monotonic() - started < 5
    go_on.set()
    sender.send({"kind": "failure", "line": "the end"})
    sender.close()
    channel.close()
    assert received[-1]["line"] == "the end"
    assert len(received) < 200


def test_the_secret_is_not_shown() -> None:
    address = ChannelAddress("127.0.0.1", 1, b"hush")
    assert "hush" not in repr(address)
