"""The worker's side of its connections to the shards of a parameter server."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.launch.wire.handshake import prove_task
from pipelines.training.modes.shard import FETCH, NO_STOP, OPENING, PUSH, REPLY, REQUEST, receive

_SECONDS_TO_CONNECT = 30.0


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
        self._sockets: list[socket.socket] = []
        self._weights = [bytearray(length) for length in weight_bytes]
        self._seen = [0] * len(addresses)
        self.steps = 0
        """Largest number of lock steps that a shard has taken."""
        self.stop_at = NO_STOP
        """The step after which all workers stop, as decided by the first shard; -1: none."""
        for address in addresses:
            connection = socket.create_connection(address, timeout=_SECONDS_TO_CONNECT)
            self._sockets.append(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove_task(connection, secret)
            connection.settimeout(None)  # a step in lock step takes as long as the slowest worker
            connection.sendall(OPENING.pack(worker))

    def fetch(self, step: int) -> list[memoryview]:
        """Return the weights of each shard as bytes when this worker may start a step; valid until the next call.

        Raises:
            ConnectionError: A rank that serves a shard has ended.
        """
        with _loss_explained():
            return self._fetch(step)

    def _fetch(self, step: int) -> list[memoryview]:
        for connection in self._sockets:
            connection.sendall(REQUEST.pack(FETCH, 0, 0, step, 0, 0, 0.0, 0))
        found = [self._take_reply(number) for number in range(len(self._sockets))]
        self._seen = [seen for _, seen in found]
        self.steps = max(steps for steps, _ in found)
        return [memoryview(weights) for weights in self._weights]

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
            self._push(step, pushed, rate, covers, is_dense=is_dense, asked=asked)

    def _push(
        self, step: int, pushed: list[list[memoryview]], rate: float, covers: int, *, is_dense: bool, asked: bool
    ) -> None:
        for connection, seen, parts in zip(self._sockets, self._seen, pushed, strict=True):
            length = sum(part.nbytes for part in parts)
            connection.sendall(REQUEST.pack(PUSH, asked, is_dense, step, covers, seen, rate, length))
            for part in parts:
                connection.sendall(part)
        for number in range(len(self._sockets)):
            self._take_reply(number)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._sockets:
            connection.close()

    def _take_reply(self, number: int) -> tuple[int, int]:
        connection = self._sockets[number]
        steps, updates, stop_at, length = REPLY.unpack(receive(connection, bytearray(REPLY.size)))
        if length:
            receive(connection, self._weights[number])
        if number == 0:
            self.stop_at = stop_at
        return steps, updates
