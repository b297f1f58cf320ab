"""The pushes of a worker to a parameter server: each gradient as the first message of a codec, or in float32."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE, all_finite, check_finite
from models.compression.codec import Codec, Context, Memory, Shape
from models.compression.schemes.scatter_gather import ScatterGather

_LENGTH = np.dtype("<u4")
_FLOAT = np.dtype(np.float32)


class PushCodec:
    """Encodes a worker's gradients, and decodes gradients of any worker; every rank has the same object.

        worker:  p = g + residual;  push Q(p);  residual = p - Q(p)
        shard:   decode Q(p), and apply it at once: there is no second stage, as a shard does not sum for others

    All pushes and the residual sum to all gradients. Tensors that are small, or of rank 0 or 1, are sent in float32, as
    in `GradientExchange`.

    The bytes of a tensor are its float32 elements, or, for each array of its message, the length in 4 bytes and the
    array.
    """

    def __init__(
        self, codec: Codec, names: Sequence[str], shapes: Sequence[Shape], *, rank: int, dense_below: int, seed: int
    ) -> None:
        """Create the residuals.

        Args:
            codec: The codec without collectives, or one of two rounds whose messages are arrays.
            names: Names of the tensors, for the state and for errors.
            shapes: Shapes of the tensors.
            rank: This worker.
            dense_below: Tensors with fewer elements are sent in float32.
            seed: Seed of all random numbers.

        Raises:
            ValueError: Messages of the codec cannot be pushed.
        """
        if codec.collectives and not isinstance(codec, ScatterGather):
            raise ValueError(f"messages of codec {codec.name} are for an allreduce, and cannot be pushed")
        self._codec, self._names, self._shapes = codec, list(names), list(shapes)
        self._rank, self._seed = rank, seed
        self._compressed = [
            bool(codec.collectives) and len(shape) > 1 and math.prod(shape) >= dense_below and codec.accepts(shape)
            for shape in shapes
        ]
        self._memories = [
            self._memory(index, shape) if compressed else {}
            for index, (shape, compressed) in enumerate(zip(self._shapes, self._compressed, strict=True))
        ]
        self._residuals = [variable for memory in self._memories for variable in memory.values()]
        self._rate = keras.Variable(0.0, trainable=False, name="pushed_rate")
        self._formats: dict[int, list[tuple[np.dtype[Any], Shape]]] = {}

    @property
    def state(self) -> list[keras.Variable]:
        """This worker's residuals, and the learning rate of their unit; empty without residuals."""
        return [*self._residuals, self._rate] if self._residuals else []

    def residual_norm(self) -> tf.Tensor:
        """Return the norm of all residuals; part of a graph."""
        values = [variable.value for variable in self._residuals]
        return tf.linalg.global_norm(values) if values else tf.constant(0.0)

    def largest_bytes(self, indexes: Sequence[int]) -> int:
        """Return the largest bytes of a push of these tensors, twice their float32: values may have places."""
        return sum(8 * math.prod(self._shapes[index]) + 64 for index in indexes)

    def encode(
        self, gradients: Sequence[tf.Tensor], step: tf.Tensor, rate: tf.Tensor | None, *, dense: bool
    ) -> list[tuple[tf.Tensor, ...]]:
        """Return the message of every tensor, after a check that all are finite; part of a graph.

        Args:
            gradients: Float32.
            step: Pushes of this worker before this one, int32.
            rate: Learning rate, with which residuals change; None: they do not change.
            dense: Whether all tensors are sent in float32.

        Raises:
            tf.errors.InvalidArgumentError: A gradient is not finite; the message has rank, step and tensor.
        """
        text = f"rank {self._rank}: {GRADIENTS_NOT_FINITE}, from optimizer step"
        with tf.control_dependencies([check_finite(all_finite(gradients), self._names, text, step)]):
            values = [tf.identity(gradient) for gradient in gradients]
        if dense:
            return [(value,) for value in values]
        scale = self._residual_scale(rate)
        return [
            self._encode(index, value, step, scale) if compressed else (value,)
            for index, (value, compressed) in enumerate(zip(values, self._compressed, strict=True))
        ]

    def pack(self, index: int, message: Sequence[NDArray[Any]], *, dense: bool) -> list[memoryview]:
        """Return the bytes of one tensor's message, in parts."""
        arrays = [np.ascontiguousarray(array) for array in message]
        if dense or not self._compressed[index]:
            return [_bytes_of(arrays[0])]
        return [_bytes_of(each) for array in arrays for each in (np.array([array.nbytes], _LENGTH), array)]

    def unpack(self, indexes: Sequence[int], pushed: memoryview, *, dense: bool) -> list[NDArray[np.float32]]:
        """Return the gradients of these tensors from a worker's packed bytes, in new memory.

        Raises:
            ValueError: The bytes belong to other tensors or to another codec.
        """
        found, place = [], 0
        for index in indexes:
            shape = self._shapes[index]
            if dense or not self._compressed[index]:
                length = _FLOAT.itemsize * math.prod(shape)
                found.append(_array(pushed, place, length, _FLOAT).reshape(shape).copy())
                place += length
                continue
            arrays = []
            for dtype, static in self._format(index):
                (length,) = _array(pushed, place, _LENGTH.itemsize, _LENGTH)
                place += _LENGTH.itemsize
                arrays.append(_array(pushed, place, int(length), dtype).reshape(static))
                place += int(length)
            assert isinstance(self._codec, ScatterGather)
            found.append(self._codec.decode(tuple(map(tf.constant, arrays)), shape).numpy())
        if place != len(pushed):
            raise ValueError(f"a push of {len(pushed)} bytes has {place} that belong to its tensors")
        return found

    def _memory(self, index: int, shape: Shape) -> dict[str, keras.Variable]:
        return {
            name: keras.Variable(tf.zeros(spec.shape), trainable=False, name=f"{name}_{index}")
            for name, spec in self._codec.state_specs(shape, 1, dense=False).items()
            if spec.scope == "worker"
        }

    def _residual_scale(self, rate: tf.Tensor | None) -> tf.Tensor:
        if rate is None:
            return tf.constant(1.0)
        before = self._rate.value.read_value()
        self._rate.assign(rate)
        return tf.where((before > 0) & (rate > 0), before / rate, 1.0)

    def _encode(self, index: int, value: tf.Tensor, step: tf.Tensor, scale: tf.Tensor) -> tuple[tf.Tensor, ...]:
        memory = self._memories[index]
        before: Memory = {name: variable.value.read_value() for name, variable in memory.items()}
        message, after = self._codec.phase(0, value, before, self._context(index, step, scale))
        for name, variable in memory.items():
            variable.assign(after[name])
        assert isinstance(message, tuple), "messages whose length depends on the data cannot be pushed"
        return message

    def _context(self, index: int, step: tf.Tensor, scale: tf.Tensor) -> Context:
        return Context(self._shapes[index], self._rank, 1, step, self._seed, index, scale)

    def _format(self, index: int) -> list[tuple[np.dtype[Any], Shape]]:
        """Return types and shapes of the arrays of a tensor's message, with -1 for lengths that depend on the step."""
        if index not in self._formats:

            def encode(value: tf.Tensor) -> tuple[tf.Tensor, ...]:
                memory = {name: tf.zeros(each.shape) for name, each in self._memories[index].items()}
                context = self._context(index, tf.constant(0), tf.constant(1.0))
                message, _ = self._codec.phase(0, value, memory, context)
                assert isinstance(message, tuple)
                return message

            traced = tf.function(encode, autograph=False).get_concrete_function(tf.TensorSpec(self._shapes[index]))
            # The step's density decides how many elements top-k sends: the last axis has any length.
            self._formats[index] = [
                (np.dtype(each.dtype.as_numpy_dtype), (*each.shape.as_list()[:-1], -1)) for each in traced.outputs
            ]
        return self._formats[index]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).data.cast("B")


def _array(pushed: memoryview, place: int, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    if place + length > len(pushed) or length % dtype.itemsize:
        raise ValueError(f"a push of {len(pushed)} bytes ends within an array of {length}")
    return np.frombuffer(pushed, dtype, length // dtype.itemsize, place)
