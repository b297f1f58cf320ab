import dataclasses
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from pipelines.launch.channel import ChannelAddress, DriverChannel, Link, Message
from pipelines.launch.logs import Spool

pytestmark = pytest.mark.timeout(60)

HELLO = {"kind": "hello", "task": 0}


@pytest.fixture
def channel() -> Iterator[DriverChannel]:
    channel = DriverChannel("127.0.0.1")
    yield channel
    channel.close()


@contextmanager
def link_to(address: ChannelAddress, task: int = 0) -> Iterator[tuple[Link, Spool]]:
    log = Spool()
    link = Link(address, {"kind": "hello", "task": task}, log)
    try:
        yield link, log
    finally:
        link.close()
        log.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited for 10 s"
        time.sleep(0.01)


def collect(channel: DriverChannel, enough: Callable[[list[Message]], bool]) -> list[Message]:
    received: list[Message] = []
    while not enough(received):
        received.append(channel.events.get(timeout=10)[1])
    return received


def first_message(channel: DriverChannel, link: Link) -> Message:
    """What the driver hears first, once both ends know of the connection."""
    _, message = channel.events.get(timeout=10)
    wait_until(lambda: link.connected)
    return message


def lines_of(received: list[Message]) -> list[str]:
    return [line for message in received if message["kind"] == "log" for line in message["lines"]]


def test_messages_arrive_whole_and_in_order(channel: DriverChannel) -> None:
    with link_to(channel.address) as (link, _):
        first_message(channel, link)
        sent = [{"kind": "report", "text": f'{i} äöü\n\t"{"x" * (i * 50)}'} for i in range(200)]
        for message in sent:
            link.send(message)
        received = collect(channel, lambda received: len(received) == len(sent))
        assert [message["text"] for message in received] == [message["text"] for message in sent]


def test_orders_reach_the_task(channel: DriverChannel) -> None:
    with link_to(channel.address, task=7) as (link, _):
        first_message(channel, link)
        channel.send(7, {"kind": "go"})
        assert link.orders.get(timeout=10) == {"kind": "go"}
        channel.send(8, {"kind": "go"})  # nobody there


def test_the_log_arrives_before_what_was_said_after_it(channel: DriverChannel) -> None:
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        log.write("".join(f"line {number}\n" for number in range(50_000)))
        link.flush(10)
        link.send({"kind": "exit"})
        received = collect(channel, lambda received: received[-1:] != [] and received[-1]["kind"] == "exit")
        assert lines_of(received) == [f"line {number}" for number in range(50_000)]


def test_messages_do_not_make_a_talkative_ranks_log_travel_faster(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.channel._LOG_BYTES_PER_PERIOD", 4096)
    monkeypatch.setattr("pipelines.launch.channel._LOG_PERIOD_SECONDS", 600.0)
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        log.write(("z" * 99 + "\n") * 400)
        for number in range(200):
            link.send({"kind": "report", "number_of_mine": number})
            time.sleep(0.001)
        received = []
        with suppress(queue.Empty):
            while True:
                received.append(channel.events.get(timeout=0.5)[1])
        sent = [message["end"] - message["offset"] for message in received if message["kind"] == "log"]
        assert 0 < sum(sent) <= 4096


def test_it_listens_on_its_address_only(channel: DriverChannel) -> None:
    assert channel._listener.getsockname()[0] == "127.0.0.1"


def test_a_wrong_secret_is_refused(channel: DriverChannel, caplog: pytest.LogCaptureFixture) -> None:
    with link_to(dataclasses.replace(channel.address, secret=secrets.token_bytes(32))) as (stranger, _):
        stranger.send({"kind": "report"})
        wait_until(lambda: channel._refused > 0)
        assert not stranger.connected
    with pytest.raises(queue.Empty):
        channel.events.get(timeout=0.1)
    assert channel.peers == set()
    channel.close()
    assert "did not know this run's secret" in caplog.text


def test_a_driver_without_the_secret_is_not_believed() -> None:
    """Whoever has taken the driver's port learns nothing and orders nothing."""
    with socket.create_server(("127.0.0.1", 0)) as impostor, suppress(OSError):
        address = ChannelAddress("127.0.0.1", impostor.getsockname()[1], secrets.token_bytes(32))
        with link_to(address) as (link, _):
            connection, _ = impostor.accept()
            with connection:
                connection.settimeout(5)
                connection.sendall(bytes(32))
                heard = connection.recv(1 << 16)
                connection.sendall(
                    bytes(32) + json.dumps({"received": 0, "log_offset": 0}).encode() + b'\n{"kind":"go"}\n'
                )
                assert address.secret not in heard
                assert connection.recv(1 << 16) == b""
            assert link.orders.empty()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), json.dumps({"kind": "log"}).encode()])
def test_strangers_without_the_secret_reach_nothing(channel: DriverChannel, noise: bytes) -> None:
    for _ in range(50):
        with socket.create_connection((channel.address.host, channel.address.port)) as stranger:
            stranger.sendall(noise)
    with link_to(channel.address) as (link, _):
        assert first_message(channel, link) == HELLO


def test_silent_strangers_keep_nobody_out(channel: DriverChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.launch.channel._MAXIMUM_STRANGERS", 20)
    place = (channel.address.host, channel.address.port)
    strangers = [socket.create_connection(place) for _ in range(100)]
    try:
        with link_to(channel.address) as (link, _):
            assert first_message(channel, link) == HELLO
        wait_until(lambda: channel._refused >= 80)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_flood_of_bad_requests_loses_and_disturbs_nothing(channel: DriverChannel) -> None:
    """Of 2,000; `tests/cluster` sends 10,000 from another host."""

    def flood() -> None:
        for number in range(500):
            with suppress(OSError), socket.create_connection((channel.address.host, channel.address.port)) as stranger:
                stranger.sendall(bytes(64) if number % 2 else b"PUT /global/0 HTTP/1.1\r\n\r\n")

    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        floods = [threading.Thread(target=flood) for _ in range(4)]
        for thread in floods:
            thread.start()
        received: list[Message] = []
        for number in range(100):
            link.send({"kind": "report", "value": number})
            log.write(f"line {number}\n")
            received += collect(channel, lambda received: received[-1:] != [] and received[-1]["kind"] == "report")
        for thread in floods:
            thread.join()
        link.flush(10)
        while not channel.events.empty():
            received.append(channel.events.get()[1])
        assert [message["value"] for message in received if message["kind"] == "report"] == list(range(100))
        assert lines_of(received) == [f"line {number}" for number in range(100)]
    wait_until(lambda: channel._refused >= 1_950)
    wait_until(lambda: threading.active_count() < 50)


def test_a_broken_connection_is_made_again_and_nothing_is_lost(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.channel._RECONNECT_SECONDS", 0.1)
    received: list[Message] = []
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        for number in range(300):
            link.send({"kind": "report", "value": number})
            log.write(f"line {number}\n")
            if number in (100, 200):
                link.flush(10)
                channel._connections[0].shutdown(socket.SHUT_RDWR)
                wait_until(lambda: not link.connected)
                wait_until(lambda: link.connected)
        link.flush(10)
        link.send({"kind": "exit"})
        received = collect(channel, lambda received: received[-1:] != [] and received[-1]["kind"] == "exit")
    assert [message["value"] for message in received if message["kind"] == "report"] == list(range(300))
    assert lines_of(received) == [f"line {number}" for number in range(300)]
    assert [message["kind"] for message in received if message["kind"] in ("gone", "back")] == ["gone", "back"] * 2


def test_a_task_that_was_started_anew_is_called_off(channel: DriverChannel) -> None:
    with link_to(channel.address) as (first, _):
        first_message(channel, first)
        with link_to(channel.address) as (second, _):
            assert second.orders.get(timeout=10) == {"kind": "stop"}
        assert channel.events.get(timeout=10) == (0, {"kind": "replaced"})
        channel.send(0, {"kind": "go"})
        assert first.orders.get(timeout=10) == {"kind": "go"}


def test_a_channel_that_dies_is_said_once_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipelines.launch.channel._RECONNECT_SECONDS", 0.01)

    def warnings() -> list[str]:
        return [record.message for record in caplog.records if "goes on without it" in record.message]

    channel = DriverChannel("127.0.0.1")
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        link.send({"kind": "report"})
        link.flush(5)
        channel.close()
        wait_until(lambda: not link.connected)
        for _ in range(3):
            link.send({"kind": "report"})
            log.write("into the void\n")
        link.flush(3600)  # longer than this test may take
        wait_until(lambda: warnings() != [])
        time.sleep(0.3)  # for many more tries
    assert len(warnings()) == 1


def test_a_driver_that_does_not_listen_holds_no_worker_up(channel: DriverChannel) -> None:
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        # All is sent, 60 MB, before the driver takes the first.
        for number in range(3000):
            link.send({"kind": "report", "text": f"{number} " + "x" * 10_000})
            log.write("y" * 10_000 + "\n")
        received = collect(
            channel, lambda received: received[-1].get("text", "").startswith("2999 ") if received else False
        )
        assert len(received) > 1000


def test_the_secret_is_not_shown() -> None:
    assert "hush" not in repr(ChannelAddress("127.0.0.1", 1, b"hush"))
