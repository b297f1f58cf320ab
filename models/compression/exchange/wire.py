"""Buckets of gradients, and the transfer of the messages of a bucket's tensors in one operation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from models.compression.arithmetic.bits import from_bytes, to_bytes
from models.compression.codec import Codec, CollectiveName, Context, Memory, Message, Shape, StateSpec


def make_buckets(indexes: Sequence[int], elements: Sequence[int], bucket_mib: float | None) -> list[list[int]]:
    """Put the gradients of the last layers, which the backward pass computes first, into the first bucket.

    Args:
        indexes: Positions of the gradients to put into buckets, rising.
        elements: Number of elements of every gradient, by position.
        bucket_mib: Largest size of a bucket, in MiB of float32; a larger gradient is a separate bucket. None: one
            bucket has all gradients.
    """
    buckets: list[list[int]] = []
    filled = math.inf
    limit = math.inf if bucket_mib is None else bucket_mib * 2**20
    for index in reversed(indexes):
        size = 4 * elements[index]
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


@dataclass(frozen=True)
class StateVariable:
    """One entry of `GradientExchange.state`."""

    name: str
    """`<state>/<tensor>`; unique."""
    spec: StateSpec
    tensor_shape: Shape
    variable: tf.Variable


class Collective(Protocol):
    """The collective operations; every rank makes the same calls, which are matched by their names."""

    @property
    def rank(self) -> int:
        """Rank of this process, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        """Return the sums over ranks, elementwise, of tensors of one dtype, as one grouped operation."""

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor | None = None, name: str | None = None) -> tf.Tensor:
        """Send one section of the first axis to each rank; return the sections from all ranks, concatenated.

        Without `splits` (int32, one length per rank) the sections are equally long.
        """

    def allgather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return the tensors of all ranks, concatenated; their first axes may differ."""


class ScatteringCollective(Collective, Protocol):
    """A collective that can also return to every rank its own part of a sum."""

    def reducescatter(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return this rank's part of the sum over ranks, of a tensor `(n,)`.

        The parts are consecutive, in the order of the ranks, and equally long. If the number of ranks N does not divide
        n, the first n modulo N ranks get one more element.
        """


def transfer(
    kind: CollectiveName, messages: Sequence[Message], collective: Collective, name: str
) -> tuple[list[Message], int | tf.Tensor]:
    """Exchange the messages of several tensors, under a name that is the same on all ranks.

    Returns:
        The received message of each tensor, and the payload: the bytes of an allreduce with the same cost. A rank sends
        2(N-1)/N times the payload. An alltoall of B bytes counts as B/2, an allgather of B bytes per rank as N * B/2.
    """
    if kind == "allreduce":
        return list(collective.allreduce(list(messages), name)), _bytes(messages)
    if any(isinstance(message, tf.RaggedTensor) for message in messages):
        received, sent = _transfer_ragged(kind, messages, collective, name)
    else:
        received, sent = _transfer_tensors(kind, messages, collective, name)
    return received, sent // 2 if kind == "alltoall" else sent * collective.size // 2


def _transfer_tensors(
    kind: CollectiveName, messages: Sequence[tuple[tf.Tensor, ...]], collective: Collective, name: str
) -> tuple[list[Message], int | tf.Tensor]:
    tensors = tf.nest.flatten(messages)
    raw = [to_bytes(tensor) for tensor in tensors]
    lengths = [each.shape[1] for each in raw]
    static = None not in lengths
    rows = tf.ensure_shape(
        _move(kind, tf.concat(raw, 1), collective, name), (collective.size, sum(lengths) if static else None)
    )
    # Messages of one tensor have the same length on all ranks, so the lengths sent are those received.
    columns = tf.split(rows, lengths if static else [tf.shape(each)[1] for each in raw], 1)
    received = [from_bytes(each, of.dtype, tuple(of.shape[1:])) for each, of in zip(columns, tensors, strict=True)]
    return tf.nest.pack_sequence_as(messages, received), _bytes(raw)


def _transfer_ragged(
    kind: CollectiveName, messages: Sequence[tf.RaggedTensor], collective: Collective, name: str
) -> tuple[list[Message], tf.Tensor]:
    """Send each row after the lengths of its messages, in one operation: a second one costs more than the bytes."""
    tensors, size = len(messages), collective.size
    lengths = tf.stack([tf.cast(message.row_lengths(), tf.int32) for message in messages], 1)
    rows = tf.concat([tf.RaggedTensor.from_tensor(to_bytes(lengths)), *messages], 1)
    splits = tf.cast(rows.row_lengths(), tf.int32) if kind == "alltoall" else None
    received = _move(kind, rows.flat_values, collective, name, splits)
    pieces = tf.RaggedTensor.from_row_lengths(received, _piece_lengths(received, size, tensors))
    columns = [tf.gather(pieces, tf.range(size) * (tensors + 1) + 1 + tensor) for tensor in range(tensors)]
    return columns, tf.size(rows.flat_values)


def _piece_lengths(received: tf.Tensor, size: int, tensors: int) -> tf.Tensor:
    """Return int64 `(size * (tensors + 1),)`: for each rank, the bytes of its lengths and of its messages."""
    head_bytes = 4 * tensors

    def read_row(row: tf.Tensor, start: tf.Tensor, lengths: tf.TensorArray) -> tuple[tf.Tensor, ...]:
        head = tf.reshape(from_bytes(received[start : start + head_bytes][None], tf.int32, (tensors,)), (tensors,))
        lengths = lengths.write(row, tf.concat([[head_bytes], head], 0))
        return row + 1, start + head_bytes + tf.reduce_sum(head), lengths

    array = tf.TensorArray(tf.int32, size, element_shape=(tensors + 1,))
    _, _, array = tf.while_loop(lambda row, *_: row < size, read_row, (0, 0, array), parallel_iterations=1)
    return tf.cast(array.concat(), tf.int64)


def _move(
    kind: CollectiveName, rows: tf.Tensor, collective: Collective, name: str, splits: tf.Tensor | None = None
) -> tf.Tensor:
    return collective.alltoall(rows, splits, name) if kind == "alltoall" else collective.allgather(rows, name)


def _bytes(tensors: Sequence[tf.Tensor]) -> int | tf.Tensor:
    if all(tensor.shape.is_fully_defined() for tensor in tensors):
        return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors)
    return tf.add_n([tf.size(tensor) * tensor.dtype.size for tensor in tensors])


def traced_payload(codec: Codec, shape: Shape, collective: Collective) -> int | None:
    """Return the payload of one tensor in bytes, see `wire.transfer`; None if it depends on the data.

    The payload is that of a step after all schedules of the codec.
    """
    payloads: list[int | tf.Tensor] = []

    def run(gradient: tf.Tensor, memory: Memory) -> None:
        late = tf.constant(1 << 30, tf.int32)
        context = Context(shape, collective.rank, collective.size, late, 0, 0, tf.constant(1.0))
        value: Message = gradient
        for number, name in enumerate(codec.collectives):
            message, memory = codec.phase(number, value, dict(memory), context)
            (value,), sent = transfer(name, [message], _Counting(collective.rank, collective.size), "counted")
            payloads.append(sent)

    state = {
        name: tf.TensorSpec(spec.shape, tf.float32)
        for name, spec in codec.state_specs(shape, collective.size, dense=False).items()
    }
    tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec(shape, tf.float32), state)
    return sum(payloads) if all(isinstance(payload, int) for payload in payloads) else None


@dataclass(frozen=True)
class _Counting:
    """A collective that returns tensors of the right shapes, for tracing."""

    rank: int
    size: int

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        return tensors

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor | None = None, name: str | None = None) -> tf.Tensor:
        return tensor

    def allgather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return tf.tile(tensor, [self.size] + [1] * (len(tensor.shape) - 1))
