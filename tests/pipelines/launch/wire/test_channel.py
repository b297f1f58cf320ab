import dataclasses
import errno
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from pipelines.launch.driver.preflight import answers
from pipelines.launch.rank.host import probe_port
from pipelines.launch.rank.rank_log import RankLog
from pipelines.launch.wire.channel import ChannelAddress, DriverChannel, ResultLostError
from pipelines.launch.wire.encoding import encode
from pipelines.launch.wire.link import TaskLink
from pipelines.launch.wire.messages import (
    Disconnected,
    Event,
    Heartbeat,
    Hello,
    Join,
    LogPart,
    MessagesDropped,
    Opening,
    ProcessExit,
    Reconnected,
    Report,
    ResultPart,
    RunRank,
    Stop,
    StopSoon,
    TaskRestarted,
    Welcome,
    decode,
)
from pipelines.launch.wire.transport import FrameConnection, frame
from tests.patience import patient, wait_until

pytestmark = pytest.mark.timeout(120)


HELLO = Hello(0, "127.0.0.1", None, "-1", "", "node", "127.0.0.1", 0, {})
EXIT = ProcessExit(False, True, 0, "exited with code 0", "", None, [])
GO = RunRank(0, {}, wants_result=True)


@pytest.fixture
def channel() -> Iterator[DriverChannel]:
    with closing(DriverChannel("127.0.0.1")) as channel:
        yield channel


@pytest.fixture(autouse=True)
def tries_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection is made again a moment after it broke."""
    monkeypatch.setattr("pipelines.launch.wire.link.RECONNECT_SECONDS", 0.01)


def connect(channel: DriverChannel) -> tuple[socket.socket, Welcome]:
    """A task of the test's own: a connection that the driver has welcomed, and its welcome."""
    connection = socket.create_connection((channel.address.host, channel.address.port), patient(50))
    frames = FrameConnection(connection)
    frames.prove(channel.address.secret)
    frames.settimeout(patient(50))
    frames.send(frame(encode(Opening("a link", HELLO))))
    welcome, _ = decode(frames.receive()[0])
    assert isinstance(welcome, Welcome)
    return connection, welcome


def test_nobody_waits_for_a_full_queue_of_a_channel_that_was_closed() -> None:
    channel = DriverChannel("127.0.0.1")
    with connect(channel)[0] as connection:
        for number in range(1, channel.events.maxsize + 10):
            connection.sendall(frame(encode(Report({"number": number}), number)))
        wait_until(channel.events.full)
        before = threading.active_count()
        channel.close()
        wait_until(lambda: threading.active_count() <= before - 2)  # the one that listens, and the one that waits


@contextmanager
def link_to(address: ChannelAddress) -> Iterator[TaskLink]:
    with closing(RankLog()) as log, closing(TaskLink(address, HELLO, log)) as link:
        yield link


def collect(channel: DriverChannel, enough: Callable[[list[Event]], bool]) -> list[Event]:
    received: list[Event] = []
    while not enough(received):
        received.append(channel.events.get(timeout=patient(50))[1])
    return received


def first_message(channel: DriverChannel, link: TaskLink) -> Event:
    """What the driver hears first, once both ends know of the connection."""
    _, message = channel.events.get(timeout=patient(50))
    wait_until(lambda: link.connected)
    return message


@pytest.fixture
def log() -> Iterator[RankLog]:
    with closing(RankLog()) as log:
        yield log


@pytest.fixture
def link(channel: DriverChannel, log: RankLog) -> Iterator[TaskLink]:
    """A link of which both ends know."""
    with closing(TaskLink(channel.address, HELLO, log)) as link:
        first_message(channel, link)
        yield link


def break_connection(channel: DriverChannel) -> None:
    channel._tasks[0].connection.hang_up()


def lines_of(received: list[Event]) -> list[str]:
    return [line for event in received if isinstance(event, LogPart) for line in event.lines]


def numbers_of(received: list[Event]) -> list[int]:
    return [event.fields["number"] for event in received if isinstance(event, Report)]


def last(event: Event) -> Callable[[list[Event]], bool]:
    return lambda received: received[-1:] == [event]


def test_the_log_arrives_before_what_was_said_after_it_and_all_before_a_task_hangs_up(
    channel: DriverChannel, link: TaskLink, log: RankLog
) -> None:
    log.write("".join(f"line {number}\n" for number in range(50_000)))
    link.flush(patient(10))
    link.send(EXIT)
    link.flush(patient(30))
    link.close()
    assert lines_of(collect(channel, last(EXIT))) == [f"line {number}" for number in range(50_000)]


def test_messages_do_not_make_a_talkative_ranks_log_travel_faster(
    channel: DriverChannel, link: TaskLink, log: RankLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.wire.link.LOG_BYTES_PER_PERIOD", 4096)
    monkeypatch.setattr("pipelines.launch.wire.link.LOG_PERIOD_SECONDS", 600.0)
    log.write(("z" * 99 + "\n") * 400)
    for number in range(200):
        link.send(Report({"number": number}))
        time.sleep(0.001)
    received = collect(channel, lambda received: any(isinstance(event, LogPart) for event in received))
    with suppress(queue.Empty):
        while True:
            received.append(channel.events.get(timeout=0.5)[1])
    assert 0 < sum(event.end - event.offset for event in received if isinstance(event, LogPart)) <= 4096


def test_a_wrong_secret_is_refused(channel: DriverChannel, caplog: pytest.LogCaptureFixture) -> None:
    with link_to(dataclasses.replace(channel.address, secret=secrets.token_bytes(32))) as stranger:
        stranger.send(Report({}))
        wait_until(lambda: channel._server.refused > 0)
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
        with link_to(address) as link:
            connection, _ = impostor.accept()
            with connection:
                connection.settimeout(patient(5))
                connection.sendall(bytes(32))
                heard = connection.recv(1 << 16)
                connection.sendall(bytes(32) + frame(encode(Welcome(0, 0, 0))) + frame(encode(GO)))
                assert (address.secret in heard, connection.recv(1 << 16)) == (False, b""), heard
            assert link.orders.empty()


def test_a_flood_of_bad_requests_loses_and_disturbs_nothing(
    channel: DriverChannel, link: TaskLink, log: RankLog
) -> None:
    """Of 2,000; `tests/cluster` sends 10,000 from another host."""
    noise = [b"", b"PUT /global/0 HTTP/1.1\r\n\r\n", bytes(64), bytes(4096), frame(encode(Heartbeat()))]

    def flood() -> None:
        for number in range(500):
            with suppress(OSError), socket.create_connection((channel.address.host, channel.address.port)) as stranger:
                stranger.sendall(noise[number % len(noise)])

    floods = [threading.Thread(target=flood) for _ in range(4)]
    for thread in floods:
        thread.start()
    received: list[Event] = []
    for number in range(100):
        link.send(Report({"number": number}))
        log.write(f"line {number}\n")
        received += collect(channel, lambda received: bool(received) and isinstance(received[-1], Report))
    for thread in floods:
        thread.join()
    link.flush(patient(10))
    while not channel.events.empty():
        received.append(channel.events.get()[1])
    assert (numbers_of(received), lines_of(received)) == (list(range(100)), [f"line {number}" for number in range(100)])
    wait_until(lambda: channel._server.refused >= 1_950)
    wait_until(lambda: threading.active_count() < 50)


def test_a_broken_connection_is_made_again_and_nothing_is_lost(
    channel: DriverChannel, link: TaskLink, log: RankLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.wire.link.RECONNECT_SECONDS", 0.1)  # the driver hears first that it broke
    sent = [Report({"text": f'{i} äöü\n\t"{"x" * (i * 50)}'}) for i in range(300)]
    for number, message in enumerate(sent):
        link.send(message)
        log.write(f"line {number}\n")
        if number in (100, 200):
            link.flush(patient(10))
            break_connection(channel)
            wait_until(lambda: not link.connected)
            wait_until(lambda: link.connected)
    link.flush(patient(10))
    link.send(EXIT)
    received = collect(channel, last(EXIT))
    assert [event for event in received if isinstance(event, Report)] == sent
    assert lines_of(received) == [f"line {number}" for number in range(300)]
    assert [event for event in received if isinstance(event, Disconnected | Reconnected)] == [
        Disconnected(),
        Reconnected(),
    ] * 2


def test_a_task_that_was_started_anew_is_called_off(channel: DriverChannel, link: TaskLink) -> None:
    with link_to(channel.address) as second:
        assert second.orders.get(timeout=patient(50)) == Stop()
    assert channel.events.get(timeout=patient(50)) == (0, TaskRestarted())
    channel.send(0, GO)
    assert link.orders.get(timeout=patient(50)) == GO


def test_a_channel_that_dies_is_said_once_and_holds_nothing_up(
    channel: DriverChannel, link: TaskLink, log: RankLog, caplog: pytest.LogCaptureFixture
) -> None:
    link.send(Report({}))
    link.flush(patient(5))
    channel.close()
    wait_until(lambda: not link.connected)
    for _ in range(3):
        link.send(Report({}))
        log.write("into the void\n")
    link.flush(3600)  # longer than this test may take
    wait_until(lambda: "continues without it" in caplog.text)
    time.sleep(0.3)  # for many more tries
    assert caplog.text.count("continues without it") == 1


def test_a_driver_that_said_that_it_is_over_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    """The ranks of one machine print into the user's notebook, where the error of the run is to be all there is."""
    ended = threading.Event()

    def talk(link: TaskLink) -> None:
        while not ended.wait(0.0001):
            link.send(Report({}))

    for _ in range(20):  # the task may be anywhere in its sending
        ended.clear()
        channel = DriverChannel("127.0.0.1")
        with link_to(channel.address) as link:
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
    assert "continues without it" not in caplog.text


def test_a_driver_that_does_not_listen_holds_no_rank_up_and_gets_everything_later(
    channel: DriverChannel, link: TaskLink, log: RankLog
) -> None:
    # All is sent, 60 MB, before the driver takes the first.
    for number in range(3000):
        link.send(Report({"number": number, "text": "x" * 10_000}))
        log.write("y" * 10_000 + "\n")
    link.send(EXIT)
    assert numbers_of(collect(channel, last(EXIT))) == list(range(3000))
    wait_until(lambda: link._unreceived_bytes < 1 << 20)  # what has been received is forgotten


def test_messages_that_do_not_fit_are_counted_and_what_matters_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.launch.wire.link.MAXIMUM_UNRECEIVED_BYTES", 10_000)
    secret, received = secrets.token_bytes(32), list[Event]()
    with ExitStack() as stack:
        driver = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # takes connections and answers none
        link = stack.enter_context(link_to(ChannelAddress("127.0.0.1", driver.getsockname()[1], secret)))
        for number in range(5000):
            link.send(Report({"number": number}))
        link.send(EXIT)
        connection = stack.enter_context(driver.accept()[0])
        frames = FrameConnection(connection)
        assert frames.accept_proof(secret)
        frames.send(frame(encode(Welcome(0, 0, 0))))
        while received[-1:] != [EXIT]:
            received.append(decode(frames.receive()[0])[0])
    numbers = numbers_of(received)
    assert 0 < len(numbers) < 5000
    assert numbers == list(range(len(numbers)))
    assert received[-2:] == [MessagesDropped(5000 - len(numbers)), EXIT]


def test_a_large_return_value_survives_a_broken_connection(channel: DriverChannel, link: TaskLink) -> None:
    value = secrets.token_bytes(1 << 16) * 300  # 19 MiB in 19 parts
    with tempfile.TemporaryFile() as file:
        file.write(value)
        file.flush()
        sender = threading.Thread(target=link.send_result, args=(file, patient(50)))
        sender.start()
        wait_until(lambda: channel._tasks[0].result_bytes > 0)
        break_connection(channel)
        sender.join(patient(50))
        assert channel.result(0).read() == value


@pytest.mark.long
def test_a_task_that_waits_for_room_in_its_socket_notices_that_the_driver_hung_up() -> None:
    """Without that it connects again when the kernel next asks for room: up to two minutes later."""
    with socket.create_server(("127.0.0.1", 0)) as driver, tempfile.TemporaryFile() as file:
        driver.settimeout(patient(30))
        secret = secrets.token_bytes(32)
        file.truncate(100 << 20)  # more than a socket holds
        with link_to(ChannelAddress("127.0.0.1", driver.getsockname()[1], secret)) as link:
            connection, _ = driver.accept()
            with connection:
                assert FrameConnection(connection).accept_proof(secret)
                connection.sendall(frame(encode(Welcome(0, 0, 0))))
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
    tries: list[tuple[int, ...]] = []

    def breaking(*come_so_far: int) -> Welcome:
        tries.append(come_so_far)
        if len(tries) == 1:
            raise ConnectionResetError
        return Welcome(*come_so_far)

    monkeypatch.setattr("pipelines.launch.wire.channel.Welcome", breaking)
    with link_to(channel.address) as link:
        assert first_message(channel, link) == HELLO
        break_connection(channel)
        assert set(collect(channel, lambda received: len(received) == 2)) == {Disconnected(), Reconnected()}


def test_the_end_of_a_rank_that_has_finished_waits_for_a_channel_that_comes_back(
    channel: DriverChannel, link: TaskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.launch.wire.link.RECONNECT_SECONDS", 1.0)
    break_connection(channel)
    wait_until(lambda: not link.connected)
    link.send(EXIT)
    link.flush(patient(5), reconnect=patient(50))
    link.close()
    assert EXIT in collect(channel, lambda received: EXIT in received)


def test_nothing_is_taken_from_a_connection_that_was_replaced(channel: DriverChannel) -> None:
    """Bytes of a broken connection can be read after the task has connected again and sent the same once more."""

    def part(offset: int, data: bytes) -> bytes:
        return frame(encode(ResultPart(offset)), len(data)) + data

    first, _ = connect(channel)
    first.sendall(part(0, b"abc"))
    wait_until(lambda: channel._tasks[0].result_bytes == 3)
    second, welcome = connect(channel)
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
    channel: DriverChannel, link: TaskLink, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(100))
        file.flush()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        assert link.send_result(file, patient(50))
        with pytest.raises(
            ResultLostError, match=r"the driver cannot keep it in a temporary folder \(TMPDIR\): .*missing"
        ):
            channel.result(0)


def test_the_secret_is_not_shown() -> None:
    assert "hush" not in repr(ChannelAddress("127.0.0.1", 1, b"hush"))


def test_an_order_that_a_broken_connection_did_not_bring_comes_with_the_next_one(
    channel: DriverChannel, link: TaskLink
) -> None:
    channel.send(0, GO)
    channel.send(8, GO)  # nobody there
    assert link.orders.get(timeout=patient(50)) == GO
    for number in range(1, 20):
        # One order before the connection breaks, which may or may not arrive, and one while there is none.
        join = Join({"NUMBER": str(number)})
        channel.send(0, join)
        break_connection(channel)
        channel.send(0, StopSoon())
        assert [link.orders.get(timeout=patient(50)) for _ in range(2)] == [join, StopSoon()], "each once"
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
    with closing(DriverChannel("127.0.0.1")) as channel:
        assert refused.wait(patient(60))
        with link_to(channel.address) as link:
            assert first_message(channel, link) == HELLO


def test_the_port_of_a_task_answers_however_often_it_is_asked() -> None:
    with probe_port("127.0.0.1") as port:
        assert port is not None
        assert all(answers("127.0.0.1", port) for _ in range(300))
