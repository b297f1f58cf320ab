"""Averages gradients over ranks: codec and collective joined."""

import math
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from models.compression.codec import Codec


class Collective(Protocol):
    """What the ranks do together; every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def allreduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums over ranks, elementwise, of tensors of one dtype, as one grouped operation."""
        ...


class GradientExchange:
    """Averages gradients over the ranks of a collective, in the payload of a codec.

    mean = decode(sum over ranks of encode(gradient / size))

    The division comes first so that the sum of half floats is at most as large as the largest gradient of a rank; the
    price is that values below size times the smallest half float (6e-8) vanish. Tensors of rank 0 or 1 and small ones
    travel dense, in float32: they are few bytes, and gains and biases are the most sensitive.

    Args:
        codec: A linear codec.
        collective: The ranks.
        dense_below: Tensors with fewer elements travel dense.

    Raises:
        ValueError: a codec that is not linear.
    """

    def __init__(self, codec: Codec, collective: Collective, *, dense_below: int = 1024) -> None:
        """Keep the parts; see the class."""
        if not codec.linear:
            raise ValueError(f"codec must be linear, whose payloads can be summed; got {codec.name!r}")
        self.codec = codec
        self.collective = collective
        self.dense_below = dense_below

    def exchange(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the means over ranks, in the order, shapes and dtypes of `gradients`.

        Makes one grouped allreduce for each payload dtype, at most two, the dtype of the first gradient first.

        Raises:
            ValueError: a gradient that is None.
        """
        _check_present(gradients)
        payloads = [self._encode(gradient) for gradient in gradients]
        indexes_by_dtype: dict[tf.DType, list[int]] = {}
        for index, payload in enumerate(payloads):
            indexes_by_dtype.setdefault(payload.dtype, []).append(index)
        for indexes in indexes_by_dtype.values():
            sums = self.collective.allreduce([payloads[index] for index in indexes])
            for index, total in zip(indexes, sums, strict=True):
                payloads[index] = total
        return [self._decode(payload, gradient) for payload, gradient in zip(payloads, gradients, strict=True)]

    def payload_bytes(self, gradients: Sequence[tf.Tensor]) -> int:
        """Return the bytes that one exchange hands to the collective on this rank.

        Only shapes and dtypes are read: tensors, variables and `tf.TensorSpec` will do.

        Raises:
            ValueError: a gradient that is None.
        """
        _check_present(gradients)
        specs = [tf.TensorSpec(gradient.shape, gradient.dtype) for gradient in gradients]
        # Traced, not run: the shapes of the payloads cost no memory.
        trace = tf.function(lambda *tensors: [self._encode(tensor) for tensor in tensors], autograph=False)
        payloads = trace.get_concrete_function(*specs).structured_outputs
        return sum(payload.shape.num_elements() * payload.dtype.size for payload in payloads)

    def _encode(self, gradient: tf.Tensor) -> tf.Tensor:
        size = self.collective.size
        scaled = tf.cast(gradient, tf.float32)
        scaled = scaled / size if size > 1 else scaled
        return self.codec.encode(scaled) if self._is_compressed(gradient) else scaled

    def _decode(self, payload: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        mean = self.codec.decode(payload) if self._is_compressed(gradient) else payload
        return tf.cast(mean, gradient.dtype)

    def _is_compressed(self, gradient: tf.Tensor) -> bool:
        return len(gradient.shape) > 1 and math.prod(gradient.shape) >= self.dense_below


def _check_present(gradients: Sequence[tf.Tensor | None]) -> None:
    missing = [index for index, gradient in enumerate(gradients) if gradient is None]
    if missing:
        raise ValueError(f"gradients {missing} are None: every rank must pass a tensor for every variable")
