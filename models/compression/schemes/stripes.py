"""The division of a tensor into one part per rank; the part's owner sums it for all ranks."""

import math

import tensorflow as tf

from models.compression.codec import Shape


class FlatLayout:
    """Cuts the flattened tensor into contiguous runs.

    Args:
        multiple: The length of a part is a multiple of this number, or of 8 if a part would be shorter than it.
    """

    def __init__(self, multiple: int = 8) -> None:
        """Store the multiple."""
        self.multiple = multiple

    def part_shape(self, shape: Shape, size: int) -> Shape:
        """Return the length of a part, as the only axis."""
        elements = -(-math.prod(shape) // size)
        multiple = self.multiple if elements >= self.multiple else min(8, self.multiple)
        return (-(-elements // multiple) * multiple,)

    def split(self, tensor: tf.Tensor, size: int) -> tf.Tensor:
        """Pad at the end and reshape."""
        (elements,) = self.part_shape(tuple(tensor.shape), size)
        flat = tf.reshape(tensor, (-1,))
        padding = size * elements - flat.shape[0]
        return tf.reshape(tf.pad(flat, [[0, padding]]) if padding else flat, (size, elements))

    def join(self, parts: tf.Tensor, shape: Shape) -> tf.Tensor:
        """Reshape and drop the padding."""
        flat = tf.reshape(parts, (-1,))
        elements = math.prod(shape)
        return tf.reshape(flat if flat.shape[0] == elements else flat[:elements], shape)

    def real(self, shape: Shape, size: int) -> list[int]:
        """Return the number of elements of each part; the last parts may hold fewer."""
        return _filled(math.prod(shape), self.part_shape(shape, size)[0], size)


class ColumnLayout:
    """Cuts the matrix `(all but the last axis, last axis)` between columns; a column has an output unit's weights."""

    def part_shape(self, shape: Shape, size: int) -> Shape:
        """Return `(rows, columns of a part)`."""
        return math.prod(shape[:-1]), -(-shape[-1] // size)

    def split(self, tensor: tf.Tensor, size: int) -> tf.Tensor:
        """Pad with columns and move the parts to the front."""
        rows, columns = self.part_shape(tuple(tensor.shape), size)
        matrix = tf.reshape(tensor, (rows, -1))
        if size == 1:
            return matrix[None]
        padding = size * columns - matrix.shape[1]
        matrix = tf.pad(matrix, [[0, 0], [0, padding]]) if padding else matrix
        return tf.transpose(tf.reshape(matrix, (rows, size, columns)), (1, 0, 2))

    def join(self, parts: tf.Tensor, shape: Shape) -> tf.Tensor:
        """Move the parts back and drop the padded columns."""
        size, rows, columns = parts.shape
        if size == 1:
            return tf.reshape(parts, shape)
        matrix = tf.reshape(tf.transpose(parts, (1, 0, 2)), (rows, size * columns))
        return tf.reshape(matrix[:, : shape[-1]], shape)

    def real(self, shape: Shape, size: int) -> list[int]:
        """Return the number of columns of each part; the last parts may hold fewer."""
        return _filled(shape[-1], self.part_shape(shape, size)[-1], size)


Layout = FlatLayout | ColumnLayout
"""How a tensor is cut into equal parts, padded with zeros, and joined again.

`split` returns the parts `(size, *part_shape)`, and `join` the tensor without the padding. `real` returns for each part
the number of entries along its last axis that are not padding.
"""


def clear_padding(parts: tf.Tensor, real: list[int]) -> tf.Tensor:
    """Return `parts`, `(parts, ..., entries)`, with zeros in place of each part's padding along the last axis."""
    entries = parts.shape[-1]
    if all(count == entries for count in real):
        return parts
    is_real = tf.range(entries) < tf.reshape(tf.constant(real), (-1,) + (1,) * (len(parts.shape) - 1))
    return tf.where(is_real, parts, tf.zeros_like(parts))


def _filled(entries: int, per_part: int, size: int) -> list[int]:
    return [min(per_part, max(0, entries - part * per_part)) for part in range(size)]
