"""How many bytes a codec sends, found out without sending any."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from models.compression.codec import Codec, Context, Memory, Message, Shape
from models.compression.exchange.wire import Collective, transfer


def traced_payload(codec: Codec, shape: Shape, collective: Collective) -> int | None:
    """Payload in bytes of one tensor after all stages, see `wire.transfer`; None where it depends on the data."""
    counting = _Counting(collective.rank, collective.size)
    slots = codec.slots(shape, collective.size, dense=False)
    sent_in_stage: list[Any] = []

    def run(gradient: tf.Tensor, memory: Memory) -> None:
        late = tf.constant(1 << 30, tf.int32)
        context = Context(shape, collective.rank, collective.size, late, 0, 0, tf.constant(1.0))
        value: Message = gradient
        for number, name in enumerate(codec.collectives):
            message, memory = codec.phase(number, value, dict(memory), context)
            (value,), sent = transfer(name, [message], counting, "counted")
            sent_in_stage.append(sent)

    specs = {name: tf.TensorSpec(slot.shape, tf.float32) for name, slot in slots.items()}
    tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec(shape, tf.float32), specs)
    return sum(sent_in_stage) if all(isinstance(sent, int) for sent in sent_in_stage) else None


@dataclass(frozen=True)
class _Counting:
    """A collective of the right shapes, for tracing."""

    rank: int
    size: int

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        return tensors

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor | None = None, name: str | None = None) -> tf.Tensor:
        return tensor

    def allgather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return tf.tile(tensor, [self.size] + [1] * (len(tensor.shape) - 1))
