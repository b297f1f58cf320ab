"""Which elements are the largest, and sending elements by their places."""

import numpy as np
import tensorflow as tf

# One in so many elements is looked at first. Odd, and so without a common factor with the widths of layers.
_STRIDE = 61
_SMALLEST = np.finfo(np.float32).tiny


def select_largest(values: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Places of the `count` largest magnitudes in each row, int32 `(rows, count)`, rising; of equal ones the first.

    Where a row has fewer that are not zero, zeros are among them, or they end with the first again and again; see
    `gather_once`.

    Exact: a sample gives a bound that very likely a few more than `count` elements of a row reach, and only these are
    compared. Where fewer or many more do, everything is.
    """
    rows, elements = values.shape
    magnitudes = tf.abs(values)
    if elements < 64 * _STRIDE:
        return _sort_all(magnitudes, count)
    bound = _bound(magnitudes, count)
    found = tf.cast(tf.where(tf.reshape(magnitudes >= tf.maximum(bound, _SMALLEST), (-1,)))[:, 0], tf.int32)
    starts = tf.searchsorted(found, tf.range(rows + 1) * elements)
    lengths = starts[1:] - starts[:-1]

    def among_found() -> tf.Tensor:
        longest = tf.maximum(tf.reduce_max(lengths), count)
        number = tf.range(longest)
        # A row that ends early is filled with its first, which counts as nothing.
        filled = number >= lengths[:, None]
        candidates = tf.gather(found, tf.minimum(starts[:-1, None] + tf.where(filled, 0, number), tf.size(found) - 1))
        weights = tf.where(filled, -1.0, tf.gather(tf.reshape(magnitudes, (-1,)), candidates))
        chosen = tf.where(_largest(weights, count))[:, 1]
        return tf.gather(candidates % elements, tf.reshape(chosen, (rows, count)), batch_dims=1)

    enough = (lengths >= count) | (bound[:, 0] < _SMALLEST)
    few = tf.reduce_all(enough) & (tf.size(found) > 0) & (tf.reduce_max(lengths) <= 4 * (count + _STRIDE))
    return tf.cond(few, among_found, lambda: _sort_all(magnitudes, count))


def gather_once(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """`values` at places that `select_largest` gave, 0 where the first comes again."""
    repeated = tf.pad(places[:, 1:] == places[:, :1], [[0, 0], [1, 0]])
    return tf.where(repeated, 0.0, tf.gather(values, places, batch_dims=1))


def _sort_all(magnitudes: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    return tf.sort(tf.math.top_k(magnitudes, count).indices, axis=1)


def _largest(weights: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Bool: the `count` largest of each row, of equal ones the first."""
    last = tf.raw_ops.NthElement(input=weights, n=count - 1, reverse=True)[:, None]
    larger, equal = weights > last, weights == last
    missing = count - tf.math.count_nonzero(larger, 1, keepdims=True, dtype=tf.int32)
    return larger | (equal & (tf.cumsum(tf.cast(equal, tf.int32), 1) <= missing))


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
    # Twice as fast as `tf.scatter_nd` on a CPU.
    sums = tf.math.unsorted_segment_sum(values, flat, tf.cast(count, tf.int64) * elements)
    return tf.reshape(sums, (count, elements))


def clear(parts: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """`parts` with zeros at `places`, `(rows, count)`."""
    rows, elements = parts.shape
    flat = tf.reshape(tf.range(rows)[:, None] * elements + places, (-1, 1))
    # Done in place where nobody else needs the parts.
    cleared = tf.tensor_scatter_nd_update(tf.reshape(parts, (-1,)), flat, tf.zeros_like(flat[:, 0], parts.dtype))
    return tf.reshape(cleared, (rows, elements))


def with_signs(places: tf.Tensor, positive: tf.Tensor) -> tf.Tensor:
    """Uint32: 31 bits of place, one of sign."""
    return tf.bitcast(places * 2 + tf.cast(positive, tf.int32), tf.uint32)


def without_signs(words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Places and whether positive, of what `with_signs` gave."""
    return tf.bitcast(tf.bitwise.right_shift(words, tf.constant(1, tf.uint32)), tf.int32), words % 2 == 1
