"""Shards and their workers over real sockets, with weights that are two numbers."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pipelines.launch.driver.failure import names_lost_peer
from pipelines.launch.wire.encoding import encode
from pipelines.launch.wire.transport import FrameConnection, frame
from pipelines.training.modes.shard import NO_STOP, Push, ShardClient, ShardOpening, ShardServer, Synchrony
from tests.patience import patient, wait_until

SECRET = b"s" * 32
PUSH = Push(step=0, covers=1, seen=0, rate=0.5, is_dense=True, asked=False)
pytestmark = pytest.mark.timeout(60)


class Server:
    """A shard of two weights, and its workers."""

    def __init__(self, rule: Synchrony, connected: int) -> None:
        self.weights = np.array([1.0, 2.0], np.float32)
        self.rates: list[float] = []
        self.shard = ShardServer(
            "127.0.0.1",
            SECRET,
            rule,
            decode=lambda pushed, dense: [np.frombuffer(pushed, np.float32).copy()],
            update=self.update,
            read=lambda: self.weights.tobytes(),
            largest_push=64,
        )
        self.workers = {number: self.client(number, SECRET) for number in range(connected)}
        for worker in self.workers.values():
            worker.fetch(0)

    def client(self, number: int, secret: bytes) -> ShardClient:
        return ShardClient([("127.0.0.1", self.shard.port)], secret, number, [8])

    def update(self, gradients: list[Any], rate: float) -> None:
        self.rates.append(rate)
        self.weights = self.weights - np.float32(rate) * gradients[0]

    def fetch(self, worker: int, step: int) -> Any:
        (weights,) = self.workers[worker].fetch(step)
        return np.frombuffer(weights, np.float32).copy()

    def push(self, worker: int, step: int, gradient: float, *, rate: float = 0.5, asked: bool = False) -> None:
        pushed = [[np.full(2, gradient, np.float32).data.cast("B")]]
        self.workers[worker].push(step, pushed, rate, covers=1, is_dense=True, asked=asked)

    def take(self, worker: int, step: int, gradient: float = 0.0) -> None:
        """Fetch and push."""
        self.fetch(worker, step)
        self.push(worker, step, gradient)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.shard.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(name: str, workers: int = 3, *, connected: int | None = None, **settings: Any) -> Server:
        servers.append(Server(Synchrony(name, workers, **settings), workers if connected is None else connected))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def in_thread(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def test_the_first_n_of_n_make_a_synchronous_step(serve: Callable[..., Server]) -> None:
    server = serve("backup")
    for step in range(2):
        for worker in (2, 0, 1):  # whatever the order
            server.push(worker, step, worker + 1.0)
        # mean of 1, 2 and 3 is 2, at a rate of 0.5
        np.testing.assert_allclose(server.fetch(0, step + 1), [1.0 - (step + 1), 2.0 - (step + 1)])
    assert (server.rates, server.shard.counts.dropped) == ([0.5, 0.5], 0)


@pytest.mark.parametrize(("name", "workers", "settings"), [("backup", 3, {}), ("async", 2, {"synchronous_steps": 1})])
def test_nobody_begins_a_step_before_the_one_before_it_is_done(
    serve: Callable[..., Server], name: str, workers: int, settings: dict[str, int]
) -> None:
    server, seen = serve(name, workers, **settings), []
    for worker in range(workers - 1):
        server.push(worker, 0, 1.0)
    waiting = in_thread(lambda: seen.append(server.fetch(0, 1)))
    time.sleep(0.05)
    assert not seen
    server.push(workers - 1, 0, 1.0)
    waiting.join(patient(10))
    np.testing.assert_allclose(seen, [[0.5, 1.5]])


def test_a_backup_worker_that_is_late_is_dropped_and_told_the_step(serve: Callable[..., Server]) -> None:
    server = serve("backup", backup_workers=1)
    for step in range(3):
        server.push(0, step, 1.0)
        server.push(1, step, 3.0)
    before = server.fetch(0, 3)
    server.push(2, 0, 1000.0)
    np.testing.assert_array_equal(server.fetch(2, 1), before)
    # It leaves out the steps that are over.
    assert (server.workers[2].steps, server.shard.counts.dropped) == (3, 1)
    np.testing.assert_allclose(before, [1.0 - 3 * 0.5 * 2, 2.0 - 3 * 0.5 * 2])


def test_an_asynchronous_push_is_an_update_at_once_at_the_rate_over_n(serve: Callable[..., Server]) -> None:
    server = serve("async")
    server.push(1, 0, 3.0)
    np.testing.assert_allclose(server.fetch(0, 0), [1.0 - 0.5 / 3 * 3, 2.0 - 0.5 / 3 * 3])


def test_one_worker_has_the_whole_rate(serve: Callable[..., Server]) -> None:
    server = serve("async", 1, staleness_aware=True)
    for step in range(3):
        server.take(0, step)
    assert server.rates == [0.5] * 3


def test_a_straggler_does_not_slow_the_others(serve: Callable[..., Server]) -> None:
    """It is in its first step all the time, and they take 50."""
    server = serve("async")
    for step in range(50):
        for worker in (0, 1):
            server.take(worker, step, 0.01)
    counts = server.shard.counts
    assert counts.largest_gap == 50
    server.push(2, 0, 0.0)
    assert (counts.most_stale, counts.staleness / counts.pushes) == pytest.approx((100, 100 / 101))


def test_a_push_that_is_later_than_usual_has_a_lower_rate(serve: Callable[..., Server]) -> None:
    server = serve("async", staleness_aware=True)
    for step in range(5):
        server.take(0, step)
    server.push(1, 0, 0.0)  # 5 updates since it has fetched
    server.take(2, 0)
    assert server.rates == pytest.approx([0.5 / 3] * 5 + [0.5 / 6, 0.5 / 3])


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_largest_gap_is_bounded_with_ssp(serve: Callable[..., Server], bound: int) -> None:
    server, steps = serve("ssp", bound=bound), 12

    def work(worker: int) -> None:
        for step in range(steps):
            server.fetch(worker, step)
            time.sleep(0.01 if worker == 2 else 0.002)  # the last one is slowed 5 times
            server.push(worker, step, 0.0)

    for thread in [in_thread(work, worker) for worker in range(3)]:
        thread.join(patient(30))
    assert server.shard.counts.pushes == 3 * steps
    assert 1 <= server.shard.counts.largest_gap <= bound + 1


def test_the_first_steps_are_in_lock_step_and_the_others_are_not(serve: Callable[..., Server]) -> None:
    server = serve("async", 2, synchronous_steps=2)
    for step in range(2):
        server.push(0, step, 1.0)
        server.push(1, step, 3.0)
        for worker in (0, 1):
            server.fetch(worker, step + 1)
    for step in range(2, 6):
        server.push(0, step, 1.0)
        server.fetch(0, step + 1)
    assert server.rates == [0.5, 0.5, *[0.25] * 4], "means at the whole rate first"
    np.testing.assert_allclose(server.weights, [1.0 - 2 - 1, 2.0 - 2 - 1])


def test_weights_are_fetched_when_lock_step_ends() -> None:
    rule = Synchrony("async", workers=2, synchronous_steps=2)
    fetched: list[int] = []
    for step in range(10):
        if rule.is_fetch_due(step, fetched[-1] if fetched else None, 4):
            fetched.append(step)
    assert fetched == [0, 1, 2, 6]


@pytest.mark.parametrize("name", ["async", "ssp", "backup"])
def test_a_worker_killed_in_a_push_changes_nothing_and_the_others_go_on(
    serve: Callable[..., Server], name: str
) -> None:
    """Its connection ends in the middle of what it sends, as the operating system does it for a process."""
    server = serve(name, connected=2, backup_workers=1 if name == "backup" else 0)
    with raw(server, 2) as connection:
        connection.sendall(frame(encode(PUSH), 8) + np.float32(1000.0).tobytes())
        wait_until(lambda: 2 in server.shard._connected)
    for step in range(5):  # with ssp they would wait for it, with bound 0
        for worker in (0, 1):
            server.take(worker, step)
    server.fetch(0, 5)
    np.testing.assert_array_equal(server.weights, [1.0, 2.0])
    assert server.shard.counts.pushes == 10


def test_a_step_that_waits_for_a_dead_worker_is_taken_without_it(serve: Callable[..., Server]) -> None:
    server = serve("backup")
    server.push(0, 0, 1.0)
    server.push(1, 0, 3.0)
    server.workers.pop(2).close()
    np.testing.assert_allclose(server.fetch(0, 1), [0.0, 1.0])


def test_only_who_knows_the_secret_is_served(serve: Callable[..., Server]) -> None:
    server = serve("async")
    with pytest.raises(ConnectionError):
        server.client(0, b"x" * 32)
    server.push(0, 0, 1.0)
    assert server.shard.counts.pushes == 1


def raw(server: Server, worker: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.shard.port))
    FrameConnection(connection).prove(SECRET)
    connection.settimeout(patient(20))
    connection.sendall(frame(encode(ShardOpening(worker))))
    return connection


@pytest.mark.parametrize("worker", [0, 3, 2**32 - 1])
def test_a_worker_is_served_once_and_only_if_there_is_such(serve: Callable[..., Server], worker: int) -> None:
    with raw(serve("async"), worker) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("more", [frame(encode(PUSH), 1 << 40), frame(encode(ShardOpening(0)))])
def test_who_announces_too_much_or_opens_again_is_hung_up_on(serve: Callable[..., Server], more: bytes) -> None:
    server = serve("async", connected=2)
    with raw(server, 2) as connection:
        connection.sendall(more)
        assert connection.recv(1) == b""
    assert server.shard.counts.pushes == 0


def test_a_push_of_other_tensors_changes_nothing(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("async")
    before = server.weights
    with pytest.raises(ConnectionError) as caught:
        server.workers[0].push(0, [[memoryview(b"abc")]], 0.5, covers=1, is_dense=True, asked=False)
    assert names_lost_peer(str(caught.value)), "the rank that serves the shard is the one to look at"
    assert "hangs up on worker 0" in caplog.text
    np.testing.assert_array_equal(server.weights, before)


def test_all_hear_of_one_step_to_stop_after_before_any_has_done_it(serve: Callable[..., Server]) -> None:
    server = serve("async")
    for step in range(4):
        server.push(0, step, 0.0)
    assert server.workers[0].stop_at == NO_STOP
    for step in range(2):
        server.push(1, step, 0.0, asked=True)
    for worker in range(3):
        server.fetch(worker, 2)
    (stop,) = {worker.stop_at for worker in server.workers.values()}
    assert stop > 4 + 1


def test_clocks_begin_again_after_a_checkpoint(serve: Callable[..., Server]) -> None:
    server = serve("backup", 2)
    server.shard.begin(7)
    for worker in (0, 1):
        server.take(worker, 7, 1.0)
    server.fetch(0, 8)
    assert server.shard.steps == 8


def test_who_does_not_say_first_which_worker_it_is_is_hung_up_on(serve: Callable[..., Server]) -> None:
    server = serve("async", connected=2)
    for first in (encode(PUSH), b"[]", b"{}", b'["ShardOpening", 0, {"worker": "2"}]'):
        with socket.create_connection(("127.0.0.1", server.shard.port)) as connection:
            FrameConnection(connection).prove(SECRET)
            connection.settimeout(patient(20))
            connection.sendall(frame(first))
            assert connection.recv(1) == b""
    assert server.shard.counts.pushes == 0
