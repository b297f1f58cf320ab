"""Which elements are the largest, and sending elements by their places."""

import numpy as np
import tensorflow as tf

# One in so many elements is looked at first. Odd, and so without a common factor with the widths of layers.
_STRIDE = 61
_SMALLEST = np.finfo(np.float32).tiny


def select_largest(magnitudes: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Places of the `count` largest in each row, int32 `(rows, count)`, largest first, ties by place.

    Where a row has fewer that are not zero, zeros follow them, or its first place again and again.

    Exact: a sample gives a bound that very likely a few more than `count` elements of a row reach, and only these are
    sorted. Where fewer or many more do, everything is.
    """
    rows, elements = magnitudes.shape
    if elements < 64 * _STRIDE:
        return tf.math.top_k(magnitudes, count).indices
    flat = tf.reshape(magnitudes, (-1,))
    bound = _bound(magnitudes, count)
    reached = magnitudes >= tf.maximum(bound, _SMALLEST)
    found = tf.where(tf.reshape(reached, (-1,)))[:, 0]
    starts = tf.searchsorted(found, tf.range(rows + 1, dtype=tf.int64) * elements)
    found_in_row = starts[1:] - starts[:-1]

    def among_found() -> tf.Tensor:
        # Magnitudes have the order of their bits.
        bits = tf.cast(tf.bitcast(tf.gather(flat, found), tf.int32), tf.int64)
        order = tf.argsort(found // elements * (1 << 32) - bits, stable=True)
        number = tf.where(tf.range(count) < found_in_row[:, None], tf.range(count), 0)
        # An empty row has no place of its own: any will do, as its elements are zero.
        number = tf.minimum(starts[:-1, None] + number, tf.size(found) - 1)
        chosen = tf.gather(found, tf.gather(order, number))
        return tf.cast(chosen % elements, tf.int32)

    enough = (found_in_row >= count) | (bound[:, 0] < _SMALLEST)
    few = tf.reduce_all(enough) & (tf.size(found) > 0) & (tf.reduce_max(found_in_row) <= 4 * (count + _STRIDE))
    return tf.cond(few, among_found, lambda: tf.math.top_k(magnitudes, count).indices)


def _bound(magnitudes: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """`(rows, 1)`: four standard deviations of the sample's share below what `count` elements are expected to reach."""
    sample = magnitudes[:, ::_STRIDE]
    share = tf.cast(count, tf.float32) / _STRIDE
    place = tf.minimum(tf.cast(share + 4 * tf.sqrt(share) + 4, tf.int32), sample.shape[1])
    return tf.math.top_k(sample, place).values[:, -1:]


def scatter_rows(
    rows: tf.Tensor, places: tf.Tensor, values: tf.Tensor, count: int | tf.Tensor, elements: int
) -> tf.Tensor:
    """`count` rows of zeros with `values` at `(rows, places)`; all three are flat."""
    flat = tf.cast(rows, tf.int64) * elements + tf.cast(places, tf.int64)
    size = tf.cast(count, tf.int64) * elements
    return tf.reshape(tf.scatter_nd(flat[:, None], values, size[None]), (count, elements))


def replace(parts: tf.Tensor, places: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """`parts` with `values` at `places`, both `(rows, count)`."""
    rows, elements = parts.shape
    flat = tf.range(rows)[:, None] * elements + places
    changed = tf.tensor_scatter_nd_update(
        tf.reshape(parts, (-1,)), tf.reshape(flat, (-1, 1)), tf.reshape(values, (-1,))
    )
    return tf.reshape(changed, (rows, elements))


def with_signs(places: tf.Tensor, positive: tf.Tensor) -> tf.Tensor:
    """Uint32: 31 bits of place, one of sign."""
    return tf.bitcast(places * 2 + tf.cast(positive, tf.int32), tf.uint32)


def without_signs(words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Places and whether positive, of what `with_signs` gave."""
    return tf.bitcast(tf.bitwise.right_shift(words, tf.constant(1, tf.uint32)), tf.int32), words % 2 == 1
