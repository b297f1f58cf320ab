"""The number of bytes that a codec sends, counted without sending."""

from dataclasses import dataclass

import tensorflow as tf

from models.compression.codec import Codec, Context, Memory, Message, Shape
from models.compression.exchange.wire import Collective, transfer


def traced_payload(codec: Codec, shape: Shape, collective: Collective) -> int | None:
    """Return the payload of one tensor in bytes, see `wire.transfer`; None if it depends on the data.

    The payload is that of a step after all schedules of the codec.
    """
    counting = _Counting(collective.rank, collective.size)
    state = codec.state_specs(shape, collective.size, dense=False)
    payloads: list[int | tf.Tensor] = []

    def run(gradient: tf.Tensor, memory: Memory) -> None:
        late = tf.constant(1 << 30, tf.int32)
        context = Context(shape, collective.rank, collective.size, late, 0, 0, tf.constant(1.0))
        value: Message = gradient
        for number, name in enumerate(codec.collectives):
            message, memory = codec.phase(number, value, dict(memory), context)
            (value,), sent = transfer(name, [message], counting, "counted")
            payloads.append(sent)

    specs = {name: tf.TensorSpec(spec.shape, tf.float32) for name, spec in state.items()}
    tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec(shape, tf.float32), specs)
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
