"""Gradient dropping: only the largest elements, the rest later."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from models.compression import kernels
from models.compression.arithmetic.selection import clear, gather_once, scatter_rows, select_largest
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import ErrorFeedback, NoMemory
from models.compression.schemes.scatter_gather import ScatterGather
from models.compression.schemes.stages import Stages
from models.compression.schemes.stripes import FlatLayout


def topk(
    *,
    density: float = 0.01,
    stages: Sequence[tuple[int, float]] = (),
    owner_factor: float = 2.0,
    error_feedback: bool = True,
) -> Codec:
    """The `density * n` elements of largest magnitude, exactly, as place and value: 8 bytes each.

    Args:
        density: Part of all elements that each rank sends, in (0, 1].
        stages: `(before_step, density)` for the first steps.
        owner_factor: Owners send so many times as many elements of the sum, which has up to N times as many: with 2,
            what two ranks send is passed on whole. What owners keep back waits twice.
        error_feedback: Without, most elements never train: for comparison only.

    Raises:
        ValueError: a density out of range, stages whose bounds do not rise, a factor below 1.

    Source: Aji and Heafield 2017, "Sparse communication for distributed gradient descent".
    Differs: local thresholds, one for each rank's part of a tensor; exact instead of estimated from a sample; values
    are sent as they are, not quantised.
    """
    memory = ErrorFeedback() if error_feedback else NoMemory()
    return ScatterGather(
        "topk",
        Largest(density_stages(density, stages)),
        memory,
        owner_quantiser=Largest(owner_stages(density, stages, owner_factor)),
        owner_feedback=error_feedback,
    )


def density_stages(density: float, stages: Sequence[tuple[int, float]]) -> Stages:
    """Stages of densities in (0, 1].

    Raises:
        ValueError: a density out of range, stages whose bounds do not rise.
    """
    result = Stages(density, stages)
    for value in result.values:
        if not 0 < value <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {value}")
    return result


def owner_stages(density: float, stages: Sequence[tuple[int, float]], factor: float) -> Stages:
    """The densities of the owners' messages.

    Raises:
        ValueError: a factor below 1.
    """
    if factor < 1:
        raise ValueError(f"owner_factor must be at least 1, got {factor}")
    return Stages(min(1.0, factor * density), [(step, min(1.0, factor * value)) for step, value in stages])


class Largest:
    """The quantiser: places, then values."""

    # How many elements reach the bound of `select_largest` depends on the data.
    compiled = False

    def __init__(self, density: Stages) -> None:
        """Keep the density by step."""
        self.density = density
        self.layout = FlatLayout(16)
        operations = kernels.load()
        self.native = None if operations is None else NativeLargest(operations, density)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """8 bytes an element that is sent."""
        count = elements_to_send(self.density, step, parts.shape[1])
        places = select_largest(parts, count)
        values = gather_once(parts, places)
        return (places, values), clear(parts, places)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Zeros where nothing was sent."""
        places, values = message
        rows = places.shape[0]
        row_of_each = tf.repeat(tf.range(rows), tf.shape(places)[1])
        return scatter_rows(row_of_each, tf.reshape(places, (-1,)), tf.reshape(values, (-1,)), rows, part_shape[0])


class NativeLargest:
    """The same in C++."""

    def __init__(self, operations: Any, density: Stages) -> None:
        """Keep the operations and the density by step."""
        self.operations = operations
        self.density = density
        self.layout = FlatLayout(16)

    def encode(
        self, term: tf.Tensor, residual: tf.Tensor | None, scale: tf.Tensor, parts: int, step: tf.Tensor
    ) -> tuple[Message, tf.Tensor, tf.Tensor]:
        """See `NativeQuantiser`."""
        (elements,) = self.layout.part_shape(tuple(term.shape), parts)
        count = elements_to_send(self.density, step, elements)
        places, values, remainder, finite = self.operations.groundswell_encode_largest(
            term, kernels.or_nothing(residual), scale, parts, elements, count
        )
        shape = (parts, count if isinstance(count, int) else None)
        message = kernels.shaped(places, shape), kernels.shaped(values, shape)
        return message, kernels.shaped(remainder, term.shape), kernels.shaped(finite, ())

    def clear(self, tensor: tf.Tensor, message: Message) -> tf.Tensor:
        """See `NativeQuantiser`."""
        places, _ = message
        (elements,) = self.layout.part_shape(tuple(tensor.shape), places.shape[0])
        return kernels.shaped(self.operations.groundswell_clear(tensor, places, elements), tensor.shape)

    def mean(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """See `NativeQuantiser`."""
        return kernels.shaped(self.operations.groundswell_mean_largest(*message, part_shape[0]), part_shape)

    def decode(self, message: Message, shape: Shape) -> tf.Tensor:
        """See `NativeQuantiser`."""
        places, _ = message
        (elements,) = self.layout.part_shape(shape, places.shape[0])
        joined = self.operations.groundswell_decode_largest(*message, elements, math.prod(shape))
        return tf.reshape(joined, shape)


def elements_to_send(density: Stages, step: tf.Tensor, elements: int) -> int | tf.Tensor:
    """Of a part with so many; a tensor where the density depends on the step."""
    return density.pick(step, [max(1, round(value * elements)) for value in density.values])
