"""Gradient dropping: only the largest elements, the rest later."""

from collections.abc import Sequence

import tensorflow as tf

from models.compression.bits import to_bytes
from models.compression.codec import Codec, Message, Shape
from models.compression.memory import ErrorFeedback, NoMemory
from models.compression.scatter_gather import ScatterGather
from models.compression.schedule import Stages
from models.compression.selection import replace, scatter_rows, select_largest
from models.compression.stripes import FlatLayout


def topk(*, density: float = 0.01, stages: Sequence[tuple[int, float]] = (), error_feedback: bool = True) -> Codec:
    """The `density * n` elements of largest magnitude, exactly, as place and value: 8 bytes each.

    Args:
        density: Part of all elements that is sent, in (0, 1].
        stages: `(before_step, density)` for the first steps.
        error_feedback: Without, most elements never train: for comparison only.

    Raises:
        ValueError: a density out of range, stages whose bounds do not rise.

    Source: Aji and Heafield 2017, "Sparse communication for distributed gradient descent".
    Differs: local thresholds, one for each rank's part of a tensor; exact instead of estimated from a sample; values
    are sent as they are, not quantised.
    """
    memory = ErrorFeedback() if error_feedback else NoMemory()
    return ScatterGather("topk", Largest(density_stages(density, stages)), memory, owner_feedback=error_feedback)


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


class Largest:
    """The quantiser: places, then values."""

    # Sorting and scattering are several times slower in what XLA makes for a CPU.
    compiled = False

    def __init__(self, density: Stages) -> None:
        """Keep the density by step."""
        self.density = density
        self.layout = FlatLayout(16)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """8 bytes an element that is sent."""
        elements = parts.shape[1]
        count = self.density.pick(step, [max(1, round(value * elements)) for value in self.density.values])
        places = select_largest(tf.abs(parts), count)
        values = tf.gather(parts, places, batch_dims=1)
        message = tf.concat([to_bytes(places), to_bytes(values)], 1)
        return message, replace(parts, places, tf.zeros_like(values))

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Zeros where nothing was sent."""
        rows, (elements,) = message.shape[0], part_shape
        count = tf.shape(message)[1] // 8
        words = tf.bitcast(tf.reshape(message, (rows, 2, count, 4)), tf.int32)
        row_of_each = tf.repeat(tf.range(rows), count)
        values = tf.bitcast(tf.reshape(words[:, 1], (-1,)), tf.float32)
        return scatter_rows(row_of_each, tf.reshape(words[:, 0], (-1,)), values, rows, elements)
