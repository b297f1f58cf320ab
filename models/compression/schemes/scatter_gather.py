"""The exchange of payloads that cannot be summed: every rank decodes and sums one part of each tensor for all."""

from collections.abc import Callable
from typing import Protocol

import tensorflow as tf

from models.compression.arithmetic.randomness import fold_in
from models.compression.codec import CollectiveName, Context, Memory, Message, Shape, Slot
from models.compression.schemes.memory import WorkerMemory
from models.compression.schemes.stripes import Layout, clear_padding


class Quantiser(Protocol):
    """Turns parts of a tensor into fewer bytes and back."""

    compiled: bool
    """Whether encode and decode may be compiled with XLA."""

    @property
    def layout(self) -> Layout:
        """How tensors are cut into parts."""
        ...

    @property
    def native(self) -> "NativeQuantiser | None":
        """The same in C++, where that can run here."""
        ...

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return a message, a row a part, and the remainder: `parts` minus what the message decodes to.

        Args:
            parts: Float32 `(parts, *part_shape)`.
            real: int32 `(parts,)`: entries along the last axis that are no padding.
            step: Exchanges done before.
            key: Of this step, tensor, rank and stage.
        """
        ...

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return float32 `(rows of the message, *part_shape)`."""
        ...


class NativeQuantiser(Protocol):
    """A quantiser in C++: it corrects, cuts and joins tensors itself, in few passes over memory."""

    def encode(
        self, term: tf.Tensor, residual: tf.Tensor | None, scale: tf.Tensor, parts: int, step: tf.Tensor
    ) -> tuple[Message, tf.Tensor, tf.Tensor]:
        """Return the message of `term + scale * residual`, the remainder, shaped as `term`, and whether all is finite.

        Args:
            term: Float32 of any shape.
            residual: As `term`, or None for zeros.
            scale: Float32 scalar.
            parts: To cut it into.
            step: Exchanges done before.
        """
        ...

    def clear(self, tensor: tf.Tensor, message: Message) -> tf.Tensor:
        """Return `tensor` with zeros where an element of the encoded tensor was sent exactly."""
        ...

    def mean(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the mean over the message's rows, one a rank, of what they decode to, of `part_shape`."""
        ...

    def decode(self, message: Message, shape: Shape) -> tf.Tensor:
        """Return the tensor of `shape` from the message's rows, one a part."""
        ...


class ScatterGather:
    """A codec of two stages around a quantiser.

        each rank:           p = memory(g);  send part r of Q(p) to rank r;  remember p - Q(p)
        owner of each part:  q = mean over ranks + owner's residual;  send Q(q) to all;  residual = q - Q(q)
        each rank:           the parts, joined

    A rank sends (N-1)/N of a payload in each stage, 2(N-1)/N as in a ring allreduce, whatever N: gathering all ranks'
    payloads instead would cost N-1 payloads. All that came out, the mean over ranks of their remainders and the owners'
    residuals sum to the mean of all gradients.

    Args:
        name: In the table.
        quantiser: Of the first stage.
        memory: Of the first stage.
        owner_quantiser: Of the second stage, with messages that the first one's `decode` reads; default: the first's.
        owner_feedback: Whether owners keep a residual.
        local_clip_norm: See `Codec`.

    Source: the two stages with a residual each are Seide et al. 2014, section 3.2.
    """

    collectives: tuple[CollectiveName, ...] = ("alltoall", "allgather")

    def __init__(
        self,
        name: str,
        quantiser: Quantiser,
        memory: WorkerMemory,
        *,
        owner_feedback: bool,
        owner_quantiser: Quantiser | None = None,
        local_clip_norm: float | None = None,
    ) -> None:
        """Keep the parts; see the class."""
        self.name = name
        self.quantiser = quantiser
        self.owner_quantiser = owner_quantiser or quantiser
        self.memory = memory
        self.owner_feedback = owner_feedback
        self.compiled = quantiser.compiled and quantiser.native is None
        self.checks_finite = quantiser.native is not None
        self.local_clip_norm = local_clip_norm

    def accepts(self, shape: Shape) -> bool:
        """Any."""
        return True

    def slots(self, shape: Shape, size: int, *, dense: bool) -> dict[str, Slot]:
        """The memory's, and the owner's residual."""
        slots = self.memory.slots(shape, dense=dense)
        if self.owner_feedback and not dense:
            slots["owner_residual"] = Slot(self.quantiser.layout.part_shape(shape, size), "owner")
        return slots

    def phase(self, number: int, value: Message, memory: Memory, context: Context) -> tuple[Message, Memory]:
        """Encode; sum and encode again; decode."""
        native = self.quantiser.native
        match number:
            case 0:
                return self._encode(value, memory, context)
            case 1:
                return self._sum(value, memory, context)
            case _:
                if native is not None:
                    result = native.decode(value, context.shape)
                else:
                    result = self.quantiser.layout.join(self._decode(value, context), context.shape)
                return result, self.memory.finish(result, memory)

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """As the memory says."""
        return self.memory.after_dense(mean, memory, warming_up=warming_up)

    def join_parts(self, parts: tf.Tensor, shape: Shape) -> tf.Tensor:
        """As the layout joins them."""
        return self.quantiser.layout.join(parts, shape)

    def _encode(self, gradient: tf.Tensor, memory: Memory, context: Context) -> tuple[Message, Memory]:
        layout, native, size = self.quantiser.layout, self.quantiser.native, context.size
        term, memory = self.memory.advance(gradient, memory)
        residual = memory.get("residual")
        if native is not None:
            message, remainder, finite = native.encode(term, residual, context.residual_scale, size, context.step)
            memory = self.memory.keep(remainder, lambda tensor: native.clear(tensor, message), memory)
            return message, {**memory, "finite": finite}
        corrected = term if residual is None else term + context.residual_scale * residual
        real = tf.constant(layout.real(context.shape, size))
        message, rest = self.quantiser.encode(layout.split(corrected, size), real, context.step, context.rank_key)
        remainder = layout.join(rest, context.shape)
        return message, self.memory.keep(remainder, _clear(remainder, corrected), memory)

    def _sum(self, value: Message, memory: Memory, context: Context) -> tuple[Message, Memory]:
        layout, native = self.quantiser.layout, self.owner_quantiser.native
        residual = memory["owner_residual"] if self.owner_feedback else None
        if native is not None:
            mean = native.mean(value, layout.part_shape(context.shape, context.size))
            message, remainder, _ = native.encode(mean, residual, context.residual_scale, 1, context.step)
            return message, {**memory, "owner_residual": remainder} if self.owner_feedback else memory
        real = layout.real(context.shape, context.size)[context.rank : context.rank + 1]
        parts = self._decode(value, context)
        mean = tf.reduce_sum(parts, 0, keepdims=True) * (1.0 / context.size)
        if residual is not None:
            mean += context.residual_scale * residual
        # Zeros do not stay zeros in all codes: padding would take part in scales and selections.
        mean = clear_padding(mean, real)
        message, remainder = self.owner_quantiser.encode(
            mean, tf.constant(real), context.step, fold_in(context.rank_key, 1)
        )
        if self.owner_feedback:
            memory = {**memory, "owner_residual": clear_padding(remainder, real)[0]}
        return message, memory

    def _decode(self, message: Message, context: Context) -> tf.Tensor:
        part_shape = self.quantiser.layout.part_shape(context.shape, context.size)
        return tf.ensure_shape(self.quantiser.decode(message, part_shape), (context.size, *part_shape))


def _clear(remainder: tf.Tensor, corrected: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda tensor: tf.where(remainder == corrected, tensor, tf.zeros_like(tensor))
