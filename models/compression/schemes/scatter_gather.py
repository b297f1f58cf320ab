"""The exchange of payloads that cannot be summed: every rank decodes and sums one part of each tensor for all."""

from typing import Protocol

import tensorflow as tf

from models.compression.arithmetic.randomness import fold_in
from models.compression.codec import Codec, CollectiveName, Context, Memory, Message, Shape, StateSpec
from models.compression.schemes.memory import WorkerMemory
from models.compression.schemes.stripes import FlatLayout, Layout, clear_padding


class Compressor(Protocol):
    """A quantiser or sparsifier: turns parts of a tensor into fewer bytes, and back. All of them inherit it."""

    compiled: bool = True
    """Whether XLA may compile encode and decode."""
    native: "NativeCompressor | None" = None
    """The same compressor in C++, or None if it cannot run here."""
    layout: Layout = FlatLayout(8)
    """How tensors are cut into parts; the owners' compressor gets the parts of the ranks' compressor."""

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return a message with one row per part, and the remainder: `parts` minus the decoded message.

        Args:
            parts: Float32 `(parts, *part_shape)`.
            real: Number of entries along the last axis that are not padding, int32 `(parts,)`.
            step: Number of exchanges before this one.
            key: Random key, different for steps, tensors, ranks, and the two rounds of an exchange.
        """

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return float32 `(rows of the message, *part_shape)`."""


class NativeCompressor(Protocol):
    """A compressor in C++ that corrects, cuts and joins tensors itself, in few passes over memory."""

    def encode(
        self, term: tf.Tensor, residual: tf.Tensor | None, scale: tf.Tensor, parts: int, step: tf.Tensor
    ) -> tuple[Message, tf.Tensor, tf.Tensor]:
        """Return the message of `term + scale * residual`, the remainder, and whether all its elements are finite.

        Args:
            term: Float32 of any shape; the remainder has the same.
            residual: A tensor of the same shape, or None for zeros.
            scale: Float32 scalar.
            parts: Number of parts to cut it into.
            step: Number of exchanges before this one.
        """

    def clear(self, tensor: tf.Tensor, message: Message) -> tf.Tensor:
        """Return `tensor` with zeros where an element of the encoded tensor was sent exactly."""

    def mean(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the mean over ranks, of `part_shape`, of the message's decoded rows, one row per rank."""

    def decode(self, message: Message, shape: Shape) -> tf.Tensor:
        """Return the tensor of `shape` from the message's rows, one row per part."""


class ScatterGather(Codec):
    """A codec of two rounds around a compressor.

        each rank:           p = memory(g);  send part r of Q(p) to rank r;  remember p - Q(p)
        owner of each part:  q = mean over ranks + owner's residual;  send Q(q) to all;  residual = q - Q(q)
        each rank:           join the parts

    A rank sends (N-1)/N of a payload in each round. Both rounds together are 2(N-1)/N, as in a ring allreduce, for any
    N. Gathering the payloads of all ranks would cost N-1 payloads instead. All results, the mean over ranks of their
    remainders, and the owners' residuals sum to the mean of all gradients.

    Args:
        name: Name in the table of codecs.
        compressor: Encodes each rank's gradient.
        memory: Keeps the residuals of a rank's messages.
        owner_compressor: Encodes each owner's mean, with the layout of the first; None takes the first.
        owner_feedback: Whether owners keep a residual.
        local_clip_norm: See `Codec`.

    Source: Seide et al. 2014, section 3.2, for the two rounds with a residual each.
    """

    collectives: tuple[CollectiveName, ...] = ("alltoall", "allgather")

    def __init__(
        self,
        name: str,
        compressor: Compressor,
        memory: WorkerMemory,
        *,
        owner_feedback: bool,
        owner_compressor: Compressor | None = None,
        local_clip_norm: float | None = None,
    ) -> None:
        """Store the pieces."""
        self.name, self.compressor = name, compressor
        self.owner_compressor = owner_compressor or compressor
        self.memory, self.owner_feedback = memory, owner_feedback
        self.compiled = compressor.compiled and compressor.native is None and self.owner_compressor.compiled
        self.checks_finite = compressor.native is not None
        self.local_clip_norm = local_clip_norm

    def state_specs(self, shape: Shape, size: int, *, dense: bool) -> dict[str, StateSpec]:
        """Return the state: that of the memory, and the owner's residual."""
        specs = self.memory.state_specs(shape, dense=dense)
        if self.owner_feedback and not dense:
            specs["owner_residual"] = StateSpec(self.compressor.layout.part_shape(shape, size), "owner")
        return specs

    def phase(self, number: int, value: Message, memory: Memory, context: Context) -> tuple[Message, Memory]:
        """Encode; sum and encode again; decode and join."""
        match number:
            case 0:
                return self._encode(value, memory, context)
            case 1:
                return self._sum(value, memory, context)
            case _:
                result = self._join(self.owner_compressor, value, context.shape, context.size)
                return result, self.memory.finish(result, memory)

    def decode(self, message: Message, shape: Shape) -> tf.Tensor:
        """Decode one rank's message for a group of one, which a receiver applies without a second round."""
        return self._join(self.compressor, message, shape, 1)

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """Return the result of the memory."""
        return self.memory.after_dense(mean, memory, warming_up=warming_up)

    def join_parts(self, parts: tf.Tensor, shape: Shape) -> tf.Tensor:
        """Join the parts by the layout."""
        return self.compressor.layout.join(parts, shape)

    def _encode(self, gradient: tf.Tensor, memory: Memory, context: Context) -> tuple[Message, Memory]:
        layout, native, size = self.compressor.layout, self.compressor.native, context.size
        term, memory = self.memory.advance(gradient, memory)
        residual = memory.get("residual")
        if native is not None:
            message, remainder, finite = native.encode(term, residual, context.residual_scale, size, context.step)
            memory = self.memory.store(remainder, lambda tensor: native.clear(tensor, message), memory)
            return message, {**memory, "finite": finite}
        corrected = term if residual is None else term + context.residual_scale * residual
        real = tf.constant(layout.real(context.shape, size))
        message, rest = self.compressor.encode(layout.split(corrected, size), real, context.step, context.rank_key)
        remainder = layout.join(rest, context.shape)

        def clear(tensor: tf.Tensor) -> tf.Tensor:
            return tf.where(remainder == corrected, tensor, tf.zeros_like(tensor))

        return message, self.memory.store(remainder, clear, memory)

    def _sum(self, value: Message, memory: Memory, context: Context) -> tuple[Message, Memory]:
        layout, native = self.compressor.layout, self.owner_compressor.native
        residual = memory["owner_residual"] if self.owner_feedback else None
        if native is not None:
            mean = native.mean(value, layout.part_shape(context.shape, context.size))
            message, remainder, _ = native.encode(mean, residual, context.residual_scale, 1, context.step)
            return message, {**memory, "owner_residual": remainder} if self.owner_feedback else memory
        real = layout.real(context.shape, context.size)[context.rank : context.rank + 1]
        parts = self._decode(self.compressor, value, context.shape, context.size)
        mean = tf.reduce_sum(parts, 0, keepdims=True) * (1.0 / context.size)
        if residual is not None:
            mean += context.residual_scale * residual
        # Not every code keeps zeros: without this step, padding would affect scales and selections.
        mean = clear_padding(mean, real)
        message, remainder = self.owner_compressor.encode(
            mean, tf.constant(real), context.step, fold_in(context.rank_key, 1)
        )
        if self.owner_feedback:
            memory = {**memory, "owner_residual": clear_padding(remainder, real)[0]}
        return message, memory

    def _decode(self, compressor: Compressor, message: Message, shape: Shape, size: int) -> tf.Tensor:
        part_shape = self.compressor.layout.part_shape(shape, size)
        return tf.ensure_shape(compressor.decode(message, part_shape), (size, *part_shape))

    def _join(self, compressor: Compressor, message: Message, shape: Shape, size: int) -> tf.Tensor:
        """Return the tensor from a message with one row per part."""
        if compressor.native is not None:
            return compressor.native.decode(message, shape)
        return self.compressor.layout.join(self._decode(compressor, message, shape, size), shape)
