"""The worker's side of its connections to the shards of a parameter server."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.launch.wire.encoding import encode
from pipelines.launch.wire.transport import FrameConnection, connect, frame
from pipelines.training.modes.shard import NO_STOP, REPLIES, Fetch, Push, ShardOpening, ShardReply


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
