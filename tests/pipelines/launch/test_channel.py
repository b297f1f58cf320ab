import base64
import dataclasses
import errno
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipelines.launch.channel import ChannelAddress, DriverChannel, ResultLostError, _Peer
from pipelines.launch.handshake import accept_task, prove_task
from pipelines.launch.link import Link
from pipelines.launch.messages import (
    Alive,
    Back,
    Dropped,
    Event,
    Exit,
    Go,
    Gone,
    Hello,
    Join,
    Log,
    Opening,
    Replaced,
    Report,
    ResultPart,
    Stop,
    StopSoon,
    Welcome,
    decode,
    encode,
)
from pipelines.launch.preflight import answers
from pipelines.launch.rank_log import RankLog
from pipelines.launch.task import _probe
from tests.patience import patient

pytestmark = pytest.mark.timeout(120)


def hello(task: int = 0) -> Hello:
    return Hello(task, "127.0.0.1", None, "-1", "", "node", "127.0.0.1", 0, {})


HELLO = hello()
EXIT = Exit(False, True, 0, "exited with code 0", "", None, [])
GO = Go(0, {}, wants_result=True)


@pytest.fixture
def channel() -> Iterator[DriverChannel]:
    channel = DriverChannel("127.0.0.1")
    yield channel
    channel.close()


def test_nobody_waits_for_a_full_queue_of_a_channel_that_was_closed() -> None:
    channel = DriverChannel("127.0.0.1")
    with socket.create_connection(("127.0.0.1", channel.address.port)) as connection:
        prove_task(connection, channel.address.secret)
        connection.sendall(encode(Opening("a link", HELLO)))
        for number in range(1, channel.events.maxsize + 10):
            connection.sendall(encode(Report({"number": number}), number))
        deadline = time.monotonic() + patient(30)
        while not channel.events.full():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = threading.active_count()
        channel.close()
        while threading.active_count() > before - 2:  # the one that listens, and the one that waits
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def link_to(address: ChannelAddress, task: int = 0) -> Iterator[tuple[Link, RankLog]]:
    log = RankLog()
    link = Link(address, hello(task), log)
    try:
        yield link, log
    finally:
        link.close()
        log.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(50)
    while not condition():
        assert time.monotonic() < deadline, f"waited for {patient(50):g} s"
        time.sleep(0.01)


def collect(channel: DriverChannel, enough: Callable[[list[Event]], bool]) -> list[Event]:
    received: list[Event] = []
    while not enough(received):
        received.append(channel.events.get(timeout=patient(50))[1])
    return received


def first_message(channel: DriverChannel, link: Link) -> Event:
    """What the driver hears first, once both ends know of the connection."""
    _, message = channel.events.get(timeout=patient(50))
    wait_until(lambda: link.connected)
    return message


def lines_of(received: list[Event]) -> list[str]:
    return [line for event in received if isinstance(event, Log) for line in event.lines]


def test_messages_arrive_whole_and_in_order(channel: DriverChannel) -> None:
    with link_to(channel.address) as (link, _):
        first_message(channel, link)
        sent = [Report({"text": f'{i} äöü\n\t"{"x" * (i * 50)}'}) for i in range(200)]
        for message in sent:
            link.send(message)
        received = collect(channel, lambda received: len(received) == len(sent))
        assert received == sent


def test_orders_reach_the_task(channel: DriverChannel) -> None:
    with link_to(channel.address, task=7) as (link, _):
        first_message(channel, link)
        channel.send(7, GO)
        assert link.orders.get(timeout=patient(50)) == GO
        channel.send(8, GO)  # nobody there


def test_the_log_arrives_before_what_was_said_after_it(channel: DriverChannel) -> None:
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        log.write("".join(f"line {number}\n" for number in range(50_000)))
        link.flush(patient(10))
        link.send(EXIT)
        received = collect(channel, lambda received: received[-1:] == [EXIT])
        assert lines_of(received) == [f"line {number}" for number in range(50_000)]


def test_messages_do_not_make_a_talkative_ranks_log_travel_faster(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.link._LOG_BYTES_PER_PERIOD", 4096)
    monkeypatch.setattr("pipelines.launch.link._LOG_PERIOD_SECONDS", 600.0)
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        log.write(("z" * 99 + "\n") * 400)
        for number in range(200):
            link.send(Report({"number": number}))
            time.sleep(0.001)
        received = collect(channel, lambda received: any(isinstance(event, Log) for event in received))
        with suppress(queue.Empty):
            while True:
                received.append(channel.events.get(timeout=0.5)[1])
        sent = [event.end - event.offset for event in received if isinstance(event, Log)]
        assert 0 < sum(sent) <= 4096


def test_it_listens_on_its_address_only(channel: DriverChannel) -> None:
    assert channel._listener.getsockname()[0] == "127.0.0.1"


def test_a_wrong_secret_is_refused(channel: DriverChannel, caplog: pytest.LogCaptureFixture) -> None:
    with link_to(dataclasses.replace(channel.address, secret=secrets.token_bytes(32))) as (stranger, _):
        stranger.send(Report({}))
        wait_until(lambda: channel._refused > 0)
        assert not stranger.connected
    with pytest.raises(queue.Empty):
        channel.events.get(timeout=0.1)
    assert channel.peers == set()
    channel.close()
    assert "did not know the secret of this run" in caplog.text


def test_a_driver_without_the_secret_is_not_believed() -> None:
    """Whoever has taken the driver's port learns nothing and orders nothing."""
    with socket.create_server(("127.0.0.1", 0)) as impostor, suppress(OSError):
        address = ChannelAddress("127.0.0.1", impostor.getsockname()[1], secrets.token_bytes(32))
        with link_to(address) as (link, _):
            connection, _ = impostor.accept()
            with connection:
                connection.settimeout(patient(5))
                connection.sendall(bytes(32))
                heard = connection.recv(1 << 16)
                connection.sendall(bytes(32) + encode(Welcome(0, 0, 0)) + encode(GO))
                assert address.secret not in heard
                assert connection.recv(1 << 16) == b""
            assert link.orders.empty()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), encode(Alive())])
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
        received: list[Event] = []
        for number in range(100):
            link.send(Report({"value": number}))
            log.write(f"line {number}\n")
            received += collect(channel, lambda received: bool(received) and isinstance(received[-1], Report))
        for thread in floods:
            thread.join()
        link.flush(patient(10))
        while not channel.events.empty():
            received.append(channel.events.get()[1])
        assert [event.fields["value"] for event in received if isinstance(event, Report)] == list(range(100))
        assert lines_of(received) == [f"line {number}" for number in range(100)]
    wait_until(lambda: channel._refused >= 1_950)
    wait_until(lambda: threading.active_count() < 50)


def test_a_broken_connection_is_made_again_and_nothing_is_lost(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.link._RECONNECT_SECONDS", 0.1)
    received: list[Event] = []
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        for number in range(300):
            link.send(Report({"value": number}))
            log.write(f"line {number}\n")
            if number in (100, 200):
                link.flush(patient(10))
                channel._tasks[0].connection.shutdown(socket.SHUT_RDWR)
                wait_until(lambda: not link.connected)
                wait_until(lambda: link.connected)
        link.flush(patient(10))
        link.send(EXIT)
        received = collect(channel, lambda received: received[-1:] == [EXIT])
    assert [event.fields["value"] for event in received if isinstance(event, Report)] == list(range(300))
    assert lines_of(received) == [f"line {number}" for number in range(300)]
    assert [event for event in received if isinstance(event, Gone | Back)] == [Gone(), Back()] * 2


def test_what_a_slow_driver_has_not_read_when_the_task_ends_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.launch.channel._QUEUED_EVENTS", 10)
    channel = DriverChannel("127.0.0.1")
    received: list[Event] = []

    def read_slowly() -> None:
        while EXIT not in received:
            received.append(channel.events.get(timeout=patient(50))[1])
            time.sleep(0.0005)

    with link_to(channel.address) as (link, log):
        reader = threading.Thread(target=read_slowly)
        reader.start()
        for number in range(3000):
            link.send(Report({"value": number}))
        log.write("last words\n")
        wait_until(lambda: link.connected)
        link.flush(patient(30))
        link.send(EXIT)
        link.flush(patient(30))
    reader.join(patient(50))
    channel.close()
    assert [event.fields["value"] for event in received if isinstance(event, Report)] == list(range(3000))
    assert lines_of(received) == ["last words"]


def test_a_task_that_was_started_anew_is_called_off(channel: DriverChannel) -> None:
    with link_to(channel.address) as (first, _):
        first_message(channel, first)
        with link_to(channel.address) as (second, _):
            assert second.orders.get(timeout=patient(50)) == Stop()
        assert channel.events.get(timeout=patient(50)) == (0, Replaced())
        channel.send(0, GO)
        assert first.orders.get(timeout=patient(50)) == GO


def test_a_channel_that_dies_is_said_once_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipelines.launch.link._RECONNECT_SECONDS", 0.01)

    def warnings() -> list[str]:
        return [record.message for record in caplog.records if "continues without it" in record.message]

    channel = DriverChannel("127.0.0.1")
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        link.send(Report({}))
        link.flush(patient(5))
        channel.close()
        wait_until(lambda: not link.connected)
        for _ in range(3):
            link.send(Report({}))
            log.write("into the void\n")
        link.flush(3600)  # longer than this test may take
        wait_until(lambda: warnings() != [])
        time.sleep(0.3)  # for many more tries
    assert len(warnings()) == 1


def test_a_driver_that_said_that_it_is_over_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks of one machine print into the user's notebook, where the error of the run is to be all there is."""
    monkeypatch.setattr("pipelines.launch.link._RECONNECT_SECONDS", 0.01)
    ended = threading.Event()

    def talk(link: Link) -> None:
        while not ended.wait(0.0001):
            link.send(Report({}))

    for _ in range(20):  # the task may be anywhere in its sending
        ended.clear()
        channel = DriverChannel("127.0.0.1")
        with link_to(channel.address) as (link, _):
            first_message(channel, link)
            talker = threading.Thread(target=talk, args=(link,))
            talker.start()
            time.sleep(0.01)
            channel.send(0, Stop())
            channel.close()
            wait_until(lambda: not link.connected)
            time.sleep(0.05)  # for a few tries to connect again
            ended.set()
            talker.join()
    assert [record.message for record in caplog.records if "continues without it" in record.message] == []


def test_a_driver_that_does_not_listen_holds_no_rank_up_and_gets_everything_later(channel: DriverChannel) -> None:
    with link_to(channel.address) as (link, log):
        first_message(channel, link)
        # All is sent, 60 MB, before the driver takes the first.
        for number in range(3000):
            link.send(Report({"number": number, "text": "x" * 10_000}))
            log.write("y" * 10_000 + "\n")
        link.send(EXIT)
        received = collect(channel, lambda received: received[-1:] == [EXIT])
        numbers = [event.fields["number"] for event in received if isinstance(event, Report)]
        assert numbers == list(range(3000))
        wait_until(lambda: link._held_bytes < 1 << 20)  # what has been received is forgotten


def test_messages_that_do_not_fit_are_counted_and_what_matters_is_kept(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.link._MAXIMUM_HELD_BYTES", 10_000)
    log = RankLog()
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # takes connections and answers none
        address = ChannelAddress("127.0.0.1", nobody.getsockname()[1], channel.address.secret)
        link = Link(address, HELLO, log)
        for number in range(5000):
            link.send(Report({"number": number}))
        link.send(EXIT)
        link._address = channel.address  # the driver can be reached again
    received = collect(channel, lambda received: received[-1:] == [EXIT])
    link.close()
    log.close()
    numbers = [event.fields["number"] for event in received if isinstance(event, Report)]
    assert 0 < len(numbers) < 5000
    assert numbers == list(range(len(numbers)))
    assert received[-2:] == [Dropped(5000 - len(numbers)), EXIT]


def test_a_large_return_value_survives_a_broken_connection(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.link._RECONNECT_SECONDS", 0.1)
    value = secrets.token_bytes(1 << 16) * 300  # 19 MiB in 19 parts
    with link_to(channel.address) as (link, _), tempfile.TemporaryFile() as file:
        first_message(channel, link)
        file.write(value)
        file.flush()
        sender = threading.Thread(target=link.send_result, args=(file, patient(50)))
        sender.start()
        wait_until(lambda: channel._tasks[0].result_bytes > 0)
        channel._tasks[0].connection.shutdown(socket.SHUT_RDWR)
        sender.join(patient(50))
        assert channel.result(0).read() == value


def test_a_task_that_waits_for_room_in_its_socket_notices_that_the_driver_hung_up() -> None:
    """Without that it connects again when the kernel next asks for room: up to two minutes later."""
    with socket.create_server(("127.0.0.1", 0)) as driver, tempfile.TemporaryFile() as file:
        driver.settimeout(patient(30))
        secret = secrets.token_bytes(32)
        file.truncate(100 << 20)  # more than a socket holds
        with link_to(ChannelAddress("127.0.0.1", driver.getsockname()[1], secret)) as (link, _):
            connection, _ = driver.accept()
            with connection:
                assert accept_task(connection, secret)
                connection.sendall(encode(Welcome(0, 0, 0)))
                sender = threading.Thread(target=link.send_result, args=(file, 2))
                sender.start()
                sent = 0
                while sent < (sent := link._result_offset) or not sent:  # until the socket is full
                    time.sleep(0.5)
                assert sent < 100 << 20
                connection.shutdown(socket.SHUT_WR)
                again, _ = driver.accept()
                again.close()
            sender.join(patient(50))


def test_a_first_connection_that_breaks_before_the_welcome_loses_no_first_message(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk_over, tries = _Peer.talk_over, []

    def breaking(self: _Peer, connection: socket.socket, orders_received: int) -> None:
        tries.append(connection)
        if len(tries) == 1:
            raise ConnectionResetError
        talk_over(self, connection, orders_received)

    monkeypatch.setattr(_Peer, "talk_over", breaking)
    monkeypatch.setattr("pipelines.launch.link._RECONNECT_SECONDS", 0.01)
    with link_to(channel.address) as (link, _):
        assert first_message(channel, link) == HELLO
        channel._tasks[0].connection.shutdown(socket.SHUT_RDWR)
        assert [type(event) for event in collect(channel, lambda received: len(received) == 2)] in (
            [Gone, Back],
            [Back, Gone],
        )


def test_the_end_of_a_rank_that_has_finished_waits_for_a_channel_that_comes_back(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.link._RECONNECT_SECONDS", 1.0)
    with link_to(channel.address) as (link, _):
        first_message(channel, link)
        channel._tasks[0].connection.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not link.connected)
        link.send(EXIT)
        link.flush(patient(5), reconnect=patient(50))
    assert EXIT in collect(channel, lambda received: EXIT in received)


def test_nothing_is_taken_from_a_connection_that_was_replaced(channel: DriverChannel) -> None:
    """Bytes of a broken connection can be read after the task has connected again and sent the same once more."""

    def connect() -> tuple[socket.socket, Welcome]:
        connection = socket.create_connection((channel.address.host, channel.address.port), patient(50))
        prove_task(connection, channel.address.secret)
        connection.sendall(encode(Opening("link", HELLO)))
        welcome, _ = decode(connection.makefile("rb").readline())
        assert isinstance(welcome, Welcome)
        return connection, welcome

    def part(offset: int, data: bytes) -> bytes:
        return encode(ResultPart(offset, base64.b64encode(data).decode()))

    first, _ = connect()
    first.sendall(part(0, b"abc"))
    wait_until(lambda: channel._tasks[0].result_bytes == 3)
    second, welcome = connect()
    assert welcome.result_bytes == 3
    first.sendall(part(3, b"xyz"))
    while first.recv(1 << 12):  # until the driver hangs up
        assert channel._tasks[0].result_bytes == 3
    second.sendall(part(3, b"def"))
    wait_until(lambda: channel._tasks[0].result_bytes == 6)
    assert channel.result(0).read() == b"abcdef"
    first.close()
    second.close()


def test_a_return_value_that_the_driver_cannot_keep_is_named(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with link_to(channel.address) as (link, _), tempfile.TemporaryFile() as file:
        first_message(channel, link)
        file.write(bytes(100))
        file.flush()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        assert link.send_result(file, patient(50))
        with pytest.raises(ResultLostError, match=r"the driver cannot keep it in .*missing \(TMPDIR\)"):
            channel.result(0)


def test_the_secret_is_not_shown() -> None:
    assert "hush" not in repr(ChannelAddress("127.0.0.1", 1, b"hush"))


def test_an_order_that_a_broken_connection_did_not_bring_comes_with_the_next_one(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.link._RECONNECT_SECONDS", 0.01)
    with link_to(channel.address) as (link, _):
        first_message(channel, link)
        channel.send(0, GO)
        assert link.orders.get(timeout=patient(50)) == GO
        for number in range(1, 20):
            # One order before the connection breaks, which may or may not arrive, and one while there is none.
            join = Join({"NUMBER": str(number)})
            channel.send(0, join)
            channel._tasks[0].connection.shutdown(socket.SHUT_RDWR)
            channel.send(0, StopSoon())
            orders = [link.orders.get(timeout=patient(50)) for _ in range(2)]
            assert orders == [join, StopSoon()], "each once"
            wait_until(lambda: link.connected)
        assert link.orders.empty()


def test_a_process_without_a_free_descriptor_takes_connections_again(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, refused = socket.socket.accept, threading.Event()

    def refuse_once(self: socket.socket) -> tuple[socket.socket, object]:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refuse_once)
    channel = DriverChannel("127.0.0.1")
    try:
        assert refused.wait(patient(60))
        link = Link(channel.address, HELLO, RankLog())
        assert channel.events.get(timeout=patient(60)) == (0, HELLO)
        link.close()
    finally:
        channel.close()


def test_the_port_of_a_task_answers_however_often_it_is_asked() -> None:
    probe = _probe("127.0.0.1")
    assert probe is not None
    assert all(answers("127.0.0.1", probe.getsockname()[1]) for _ in range(300))
    probe.shutdown(socket.SHUT_RDWR)
    probe.close()
