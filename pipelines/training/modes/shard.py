"""A shard of a parameter server, which applies the gradients that workers push to it, and a worker's connections."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelines.launch.wire.encoding import MessageKinds, encode
from pipelines.launch.wire.transport import ConnectionServer, FrameConnection, connect, frame

NO_STOP = -1
_STEPS_TO_HEAR = 3
"""Steps from the push that announces a stop to the first step after which a worker can stop; see `_Losses`."""

_log = logging.getLogger(__name__)
Gradients = list[NDArray[np.float32]]


@dataclass(frozen=True)
class ShardOpening:
    """Worker to shard, first: the number of the worker."""

    worker: int


@dataclass(frozen=True)
class Fetch:
    """Worker to shard: a request for the weights, answered when the worker may start a step."""

    step: int


@dataclass(frozen=True)
class Push:
    """Worker to shard: gradients, which are the data of the frame."""

    step: int
    """Number of the worker's steps before the first step of these gradients."""
    covers: int
    """Number of steps whose gradients are summed."""
    seen: int
    """Number of the shard's updates before the worker's latest fetch."""
    rate: float
    """Learning rate of a step of all workers."""
    is_dense: bool
    """Whether all gradients are float32."""
    asked: bool
    """Whether the worker was asked to stop."""


@dataclass(frozen=True)
class ShardReply:
    """Shard to worker, after each request: the state of the shard; the reply to a fetch has the weights as data."""

    steps: int
    """Number of steps in lock step so far."""
    updates: int
    stop_at: int
    """The step after which all workers stop; -1: none."""


OPENINGS = MessageKinds[ShardOpening](ShardOpening)
REQUESTS = MessageKinds[Fetch | Push](Fetch, Push)
REPLIES = MessageKinds[ShardReply](ShardReply)


@dataclass(frozen=True)
class Synchrony:
    """The rule that says when a shard applies a push, and how long a worker waits before its next step."""

    name: Literal["async", "ssp", "backup"]
    workers: int
    bound: int = 0
    """Maximum number of steps that a worker may be ahead of the slowest one, with `ssp`."""
    backup_workers: int = 0
    """Number of workers whose gradients a step does not wait for, with `backup`."""
    staleness_aware: bool = False
    """Whether a push that is later than usual is applied at a lower rate, with `async` and `ssp`."""
    synchronous_steps: int = 0
    """Number of first steps in lock step, with `async` and `ssp`."""
    push_every: int = 1
    """Number of a worker's steps per push."""

    def is_lock_step(self, step: int) -> bool:
        """Return whether workers wait for each other in a step."""
        return self.name == "backup" or step < self.synchronous_steps

    def is_fetch_due(self, step: int, fetched_at: int | None, every: int) -> bool:
        """Return whether a worker fetches the weights before a step.

        The fetch after the last step in lock step waits until every shard has applied this step.

        Args:
            step: Number of steps that the worker has done.
            fetched_at: Number of steps that it had done at its last fetch; None: it has not fetched.
            every: Number of steps per fetch when workers do not wait for each other.
        """
        if fetched_at is None or self.name == "ssp" or self.is_lock_step(step) or step == self.synchronous_steps:
            return True
        return step - fetched_at >= every

    def rate(self, rate: float, staleness: int) -> float:
        """Return the learning rate of one push: N pushes at the usual staleness equal one step of all N workers."""
        return rate / max(self.workers, staleness + 1 if self.staleness_aware else 0)


@dataclass
class PushCounts:
    """The pushes that a shard has received since `begin`, in figures."""

    pushes: int = 0
    dropped: int = 0
    """Number of pushes that arrived after their step."""
    staleness: int = 0
    """Sum over all pushes of the updates by others since the worker fetched."""
    most_stale: int = 0
    largest_gap: int = 0
    """Largest difference between two workers in steps."""


class ShardServer:
    """Serves one connection per worker, each in its own thread, until `close`.

    In lock step the mean of a step's first N - b gradients makes one update, with b backup workers. It is summed in
    worker order. Later gradients of that step are dropped. Otherwise each push is an update. A push is received
    completely before it is applied, under one lock. So a worker that dies during a push changes nothing. Nobody waits
    for a worker whose connection has ended.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        synchrony: Synchrony,
        *,
        decode: Callable[[memoryview, bool], Gradients],
        update: Callable[[Gradients, float], None],
        read: Callable[[], bytes],
        largest_push: int,
    ) -> None:
        """Bind a random port and serve.

        Args:
            host: The address to listen on. Workers connect to it.
            secret: The secret of the run. Both ends of a connection prove that they know it.
            synchrony: The rule.
            decode: Returns the gradients of a push; its second argument says whether they are float32.
            update: Updates the weights with gradients at a learning rate.
            read: Returns the weights as bytes.
            largest_push: Bytes of the largest push. A connection that announces more is closed.
        """
        self.synchrony = synchrony
        self._decode, self._update, self._read = decode, update, read
        self._changed = threading.Condition()
        self._connected: set[int] = set()
        self.begin(0)
        self._server = ConnectionServer(
            host, secret, self._serve, maximum_data_bytes=largest_push, name="groundswell-shard"
        )
        self.port = self._server.port

    def begin(self, step: int) -> None:
        """Start after `step` steps of every worker; no worker pushes during this call."""
        with self._changed:
            self.steps, self.updates = step, 0
            self._clock = dict.fromkeys(range(self.synchrony.workers), step)
            self._waiting: dict[int, Gradients] = {}
            self._snapshot: bytes | None = None
            self._stop_at = NO_STOP
            self.counts = PushCounts()

    def take_counts(self) -> PushCounts:
        """Return the counts so far and reset them."""
        with self._changed:
            counts, self.counts = self.counts, PushCounts()
            return counts

    def close(self) -> None:
        """Close all connections."""
        self._server.close()

    def _serve(self, connection: FrameConnection) -> None:
        worker = OPENINGS.decode(connection.receive()[0])[0].worker
        with self._changed:
            if worker not in self._clock or worker in self._connected:
                return
            self._connected.add(worker)
        try:
            self._answer(connection, worker)
        finally:
            with self._changed:
                self._connected.discard(worker)
                self._step_where_enough()
                self._changed.notify_all()

    def _answer(self, connection: FrameConnection, worker: int) -> None:
        """Answer requests until the worker closes the connection."""
        while True:
            message, pushed = connection.receive()
            request, _ = REQUESTS.decode(message)
            try:
                if isinstance(request, Push):
                    self._push(worker, request, self._decode(pushed, request.is_dense))
                weights = self._fetch(request.step) if isinstance(request, Fetch) else b""
            except Exception:  # the worker then loses its connection, and this rank's log has the reason
                _log.exception("the shard hangs up on worker %d", worker)
                return
            with self._changed:
                reply = ShardReply(self.steps, self.updates, self._stop_at)
            connection.send(frame(encode(reply), len(weights)), [memoryview(weights)])

    def _push(self, worker: int, push: Push, gradients: Gradients) -> None:
        with self._changed:
            self.counts.pushes += 1
            if not self.synchrony.is_lock_step(push.step):
                staleness = self.updates - push.seen
                self.counts.staleness += staleness
                self.counts.most_stale = max(self.counts.most_stale, staleness)
                self._change(gradients, self.synchrony.rate(push.rate, staleness))
            elif push.step == self.steps:
                self._waiting[worker] = gradients
                self._rate = push.rate
                self._step_where_enough()
            else:
                self.counts.dropped += 1
            self._clock[worker] = push.step + push.covers
            self.counts.largest_gap = max(self.counts.largest_gap, max(self._clock.values()) - self._slowest())
            if push.asked and self._stop_at == NO_STOP:
                self._stop_at = max(self._clock.values()) + self.synchrony.push_every + _STEPS_TO_HEAR
            self._changed.notify_all()

    def _step_where_enough(self) -> None:
        """Take the step if enough gradients have arrived, or those of all remaining workers."""
        needed = self.synchrony.workers - self.synchrony.backup_workers
        if not self._waiting or len(self._waiting) < min(needed, len(self._connected)):
            return
        arrived = [self._waiting[worker] for worker in sorted(self._waiting)]
        share = np.float32(1.0 / len(arrived))
        means = [sum(each[1:], each[0].copy()) * share for each in map(list, zip(*arrived, strict=True))]
        self._waiting.clear()
        self._change(means, self._rate)
        self.steps += 1

    def _change(self, gradients: Gradients, rate: float) -> None:
        self._update(gradients, rate)
        self.updates += 1
        self._snapshot = None

    def _fetch(self, step: int) -> bytes:
        """Wait until the worker may start this step, and return the weights."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_begin(step))
            if self._snapshot is None:
                self._snapshot = self._read()
            return self._snapshot

    def _may_begin(self, step: int) -> bool:
        rule = self.synchrony
        if rule.is_lock_step(step) or self.steps < rule.synchronous_steps:
            return self.steps >= (step if rule.name == "backup" else min(step, rule.synchronous_steps))
        return rule.name != "ssp" or step - self._slowest() <= rule.bound

    def _slowest(self) -> int:
        """Return the steps of the slowest connected worker."""
        return min((self._clock[worker] for worker in self._connected), default=max(self._clock.values()))


@contextmanager
def _loss_explained() -> Iterator[None]:
    """Make the error say, like Gloo's errors, that another rank is the cause; see `failure.names_lost_peer`."""
    try:
        yield
    except OSError as error:
        raise ConnectionError(f"Connection closed by peer: a rank that serves a shard has ended ({error})") from error


class ShardClient:
    """The connections of one worker to all shards."""

    def __init__(self, addresses: list[tuple[str, int]], secret: bytes, worker: int, weight_bytes: list[int]) -> None:
        """Connect to all shards.

        Args:
            addresses: Host and port of each shard, in shard order.
            secret: The secret of the run.
            worker: Number of this worker.
            weight_bytes: Bytes of the weights that each shard holds.

        Raises:
            ConnectionError: A shard does not know the secret.
            OSError: A shard cannot be reached.
        """
        self._connections: list[FrameConnection] = []
        self._seen = [0] * len(addresses)
        self.steps = 0
        """Largest number of lock steps that a shard has taken."""
        self.stop_at = NO_STOP
        """The step after which all workers stop, as decided by the first shard; -1: none."""
        for (host, port), length in zip(addresses, weight_bytes, strict=True):
            self._connections.append(connect(host, port, secret, length))
            self._connections[-1].send(frame(encode(ShardOpening(worker))))

    def fetch(self, step: int) -> list[memoryview]:
        """Return the weights of each shard as bytes when this worker may start a step; valid until the next call.

        Raises:
            ConnectionError: A rank that serves a shard has ended.
        """
        request = frame(encode(Fetch(step)))
        with _loss_explained():
            for connection in self._connections:
                connection.send(request)
            replies, weights = self._take_replies()
        self._seen = [reply.updates for reply in replies]
        self.steps = max(reply.steps for reply in replies)
        return weights

    def push(
        self, step: int, pushed: list[list[memoryview]], rate: float, *, covers: int, is_dense: bool, asked: bool
    ) -> None:
        """Send each shard its gradients, and wait until every shard has applied, stored or dropped them.

        Args:
            step: Number of this worker's steps before the first step of these gradients.
            pushed: Parts of the message for each shard.
            rate: Learning rate of a step of all workers.
            covers: Number of steps whose gradients are summed.
            is_dense: Whether all gradients are float32.
            asked: Whether this worker was asked to stop.

        Raises:
            ConnectionError: A rank that serves a shard has ended.
        """
        with _loss_explained():
            for connection, seen, parts in zip(self._connections, self._seen, pushed, strict=True):
                message = encode(Push(step, covers, seen, rate, is_dense, asked))
                connection.send(frame(message, sum(part.nbytes for part in parts)), parts)
            self._take_replies()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()

    def _take_replies(self) -> tuple[list[ShardReply], list[memoryview]]:
        frames = [connection.receive() for connection in self._connections]
        replies = [REPLIES.decode(message)[0] for message, _ in frames]
        self.stop_at = replies[0].stop_at
        return replies, [data for _, data in frames]
