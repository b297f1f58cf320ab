"""Gradient dropping: the largest elements are sent now, the others later."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from models.compression import kernels
from models.compression.arithmetic.selection import clear, gather_once, scatter_rows, select_largest
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import ErrorFeedback, NoMemory
from models.compression.schemes.piecewise import PiecewiseConstant, density_by_step, elements_to_send
from models.compression.schemes.scatter_gather import Compressor, ScatterGather
from models.compression.schemes.stripes import FlatLayout


def topk(
    *,
    density: float,
    density_schedule: Sequence[tuple[int, float]],
    owner_factor: float,
    error_feedback: bool,
) -> Codec:
    """Send the `density * n` elements of largest magnitude, exactly, as place and value: 8 bytes each.

    Args:
        density: Part of all elements that each rank sends, in (0, 1].
        density_schedule: Pairs `(before_step, density)` for the first steps.
        owner_factor: Number of elements of the sum that an owner sends, in units of a rank's number for its part. The
            sum of N ranks has up to N times as many: with a factor of 2, everything that two ranks send reaches all
            ranks at once.
        error_feedback: Whether what was not sent is added to the next gradient. Without it most elements never train:
            only for comparison.

    Raises:
        ValueError: a density out of range, values of before_step that do not rise, or a factor below 1.

    Source: Aji and Heafield 2017, "Sparse communication for distributed gradient descent".
    Differs: local thresholds, one for each rank's part of a tensor; exact instead of estimated from a sample; values
    are sent exactly, not quantised.
    """
    densities = density_by_step(density, density_schedule)
    return ScatterGather(
        "topk",
        TopKSparsifier(densities),
        ErrorFeedback() if error_feedback else NoMemory(),
        owner_compressor=owner_sparsifier(densities, owner_factor),
        owner_feedback=error_feedback,
    )


def owner_sparsifier(density: PiecewiseConstant, owner_factor: float) -> "TopKSparsifier":
    """Return the owners' compressor of sums, which sends `owner_factor` times as many elements as a rank's.

    Raises:
        ValueError: a factor below 1.
    """
    if owner_factor < 1:
        raise ValueError(f"owner_factor must be at least 1, got {owner_factor}")
    return TopKSparsifier(density.scaled(owner_factor))


class TopKSparsifier(Compressor):
    """Sends places, then values."""

    # The number of elements that reach the bound in `select_largest` depends on the data.
    compiled = False

    def __init__(self, density: PiecewiseConstant) -> None:
        """Store the density as a function of the step."""
        self.density = density
        self.layout = FlatLayout(16)
        operations = kernels.load()
        self.native = None if operations is None else NativeTopKSparsifier(operations, density)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 8 bytes per sent element."""
        count = elements_to_send(self.density, step, parts.shape[1])
        places = select_largest(parts, count)
        return (places, gather_once(parts, places)), clear(parts, places)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the sent values, zeros elsewhere."""
        places, values = message
        rows = places.shape[0]
        row_of_each = tf.repeat(tf.range(rows), tf.shape(places)[1])
        return scatter_rows(row_of_each, tf.reshape(places, (-1,)), tf.reshape(values, (-1,)), rows, part_shape[0])


class NativeTopKSparsifier:
    """`TopKSparsifier` in C++."""

    def __init__(self, operations: Any, density: PiecewiseConstant) -> None:
        """Store the operations, and the density as a function of the step."""
        self.operations, self.density = operations, density
        self.layout = FlatLayout(16)

    def encode(
        self, term: tf.Tensor, residual: tf.Tensor | None, scale: tf.Tensor, parts: int, step: tf.Tensor
    ) -> tuple[Message, tf.Tensor, tf.Tensor]:
        """See `NativeCompressor`."""
        (elements,) = self.layout.part_shape(tuple(term.shape), parts)
        count = elements_to_send(self.density, step, elements)
        places, values, remainder, finite = self.operations.groundswell_encode_largest(
            term, kernels.or_nothing(residual), scale, parts, elements, count
        )
        shape = (parts, count if isinstance(count, int) else None)
        message = kernels.shaped(places, shape), kernels.shaped(values, shape)
        return message, kernels.shaped(remainder, term.shape), kernels.shaped(finite, ())

    def clear(self, tensor: tf.Tensor, message: Message) -> tf.Tensor:
        """See `NativeCompressor`."""
        places, _ = message
        (elements,) = self.layout.part_shape(tuple(tensor.shape), places.shape[0])
        return kernels.shaped(self.operations.groundswell_clear(tensor, places, elements), tensor.shape)

    def mean(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """See `NativeCompressor`."""
        return kernels.shaped(self.operations.groundswell_mean_largest(*message, part_shape[0]), part_shape)

    def decode(self, message: Message, shape: Shape) -> tf.Tensor:
        """See `NativeCompressor`."""
        places, _ = message
        (elements,) = self.layout.part_shape(shape, places.shape[0])
        return tf.reshape(self.operations.groundswell_decode_largest(*message, elements, math.prod(shape)), shape)
