"""Selects the largest elements, reads and writes elements at given places, and lists places with a sign."""

from collections.abc import Callable
from functools import cache

import numpy as np
import tensorflow as tf

from models.compression.arithmetic.bits import to_bytes
from models.compression.arithmetic.graph import fused

Size = Callable[[tf.Tensor], tf.Tensor]

# The sample has one of this number of elements. An odd number shares no factor with the usual widths of layers.
_STRIDE = 61
_SMALLEST = np.finfo(np.float32).tiny


def select_largest(values: tf.Tensor, count: int | tf.Tensor, size: Size = tf.abs) -> tf.Tensor:
    """Return the places of the `count` largest elements of each row, int32 `(rows, count)`, in rising order.

    Of equal elements the first are taken. If fewer than `count` elements of a row have a size above 0, the result has
    places of zeros or repeats the first place; see `gather_once`.

    The result is exact. A sample gives a bound that very likely a few more than `count` elements of a row reach, and
    only these are compared. If fewer or many more reach it, all elements are compared.

    Args:
        values: Float32 `(rows, elements)`.
        count: Number of elements to select in each row.
        size: Maps elements to the compared values, 0 or more: the magnitude, or the magnitude of one sign only.
    """
    rows, elements = values.shape
    if elements < 64 * _STRIDE:
        return _sort_all(size(values), count)
    bound = _bound(size(values[:, ::_STRIDE]), count)
    reached = _reaching(size)(values, tf.maximum(bound, _SMALLEST))
    found = tf.cast(tf.where(tf.reshape(reached, (-1,)))[:, 0], tf.int32)
    starts = tf.searchsorted(found, tf.range(rows + 1) * elements)
    lengths = starts[1:] - starts[:-1]

    def among_found() -> tf.Tensor:
        longest = tf.maximum(tf.reduce_max(lengths), count)
        number = tf.range(longest)
        # A short row is filled with its first candidate, at a weight below all others.
        filled = number >= lengths[:, None]
        candidates = tf.gather(found, tf.minimum(starts[:-1, None] + tf.where(filled, 0, number), tf.size(found) - 1))
        weights = tf.where(filled, -1.0, size(tf.gather(tf.reshape(values, (-1,)), candidates)))
        last = tf.raw_ops.NthElement(input=weights, n=count - 1, reverse=True)
        chosen = tf.where(_down_to(last[:, None], weights, count))[:, 1]
        return tf.gather(candidates % elements, tf.reshape(chosen, (rows, count)), batch_dims=1)

    enough = (lengths >= count) | (bound[:, 0] < _SMALLEST)
    few = tf.reduce_all(enough) & (tf.size(found) > 0) & (tf.reduce_max(lengths) <= 4 * (count + _STRIDE))
    return tf.cond(few, among_found, lambda: _sort_all(size(values), count))


def largest_of_each(sizes: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Return a mask of the `counts` (int32 `(rows,)`) largest of each row; of equal elements the first are taken."""

    def last(row: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        sizes, count = row
        return tf.raw_ops.NthElement(input=sizes, n=tf.maximum(count, 1) - 1, reverse=True)

    lasts = tf.map_fn(last, (sizes, counts), fn_output_signature=tf.float32)
    return _down_to(lasts[:, None], sizes, counts[:, None])


def gather_once(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Return `values` at places from `select_largest`, with 0 where the first place is repeated."""
    repeated = tf.pad(places[:, 1:] == places[:, :1], [[0, 0], [1, 0]])
    return tf.where(repeated, 0.0, tf.gather(values, places, batch_dims=1))


@cache
def _reaching(size: Size) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    return fused(lambda values, bound: size(values) >= bound)


def _sort_all(sizes: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    return tf.sort(tf.math.top_k(sizes, count).indices, axis=1)


def _down_to(last: tf.Tensor, weights: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Return a mask of the `count` largest of each row, `last` the smallest of them; of equals the first are taken."""
    larger, equal = weights > last, weights == last
    missing = count - tf.math.count_nonzero(larger, 1, keepdims=True, dtype=tf.int32)
    return larger | (equal & (tf.cumsum(tf.cast(equal, tf.int32), 1) <= missing))


def _bound(sample: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Return `(rows, 1)`: a value that `count` elements reach, lowered by four standard deviations of the sample."""
    share = tf.cast(count, tf.float32) / _STRIDE
    place = tf.minimum(tf.cast(share + 4 * tf.sqrt(share) + 4, tf.int32), sample.shape[1])
    return tf.math.top_k(sample, place).values[:, -1:]


def scatter_rows(
    rows: tf.Tensor, places: tf.Tensor, values: tf.Tensor, count: int | tf.Tensor, elements: int
) -> tf.Tensor:
    """Return `count` rows of zeros with `values` at `(rows, places)`; these three are flat."""
    flat = tf.cast(rows, tf.int64) * elements + tf.cast(places, tf.int64)
    # Twice as fast as `tf.scatter_nd` on a CPU.
    sums = tf.math.unsorted_segment_sum(values, flat, tf.cast(count, tf.int64) * elements)
    return tf.reshape(sums, (count, elements))


def clear(parts: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Return `parts` with zeros at `places`, `(rows, count)`."""
    rows, elements = parts.shape
    flat = tf.reshape(tf.range(rows)[:, None] * elements + places, (-1, 1))
    # TensorFlow does this in place if no other operation reads the parts.
    return tf.reshape(
        tf.tensor_scatter_nd_update(tf.reshape(parts, (-1,)), flat, tf.zeros_like(flat[:, 0], parts.dtype)),
        (rows, elements),
    )


def subtract(parts: tf.Tensor, rows: tf.Tensor, places: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return `parts` minus `values` at `(rows, places)`; these three are flat."""
    count, elements = parts.shape
    flat = (rows * elements + places)[:, None]
    # TensorFlow does this in place if no other operation reads the parts.
    return tf.reshape(tf.tensor_scatter_nd_sub(tf.reshape(parts, (-1,)), flat, values), (count, elements))


def encode_signs(rows: tf.Tensor, places: tf.Tensor, positive: tf.Tensor, head: tf.Tensor) -> tf.RaggedTensor:
    """Return one row of bytes per part: `head`, then 4 bytes per entry, with 31 bits of place and one bit of sign.

    Args:
        rows: The part of each entry, int32 `(entries,)`, in rising order.
        places: The place of each entry in its part, int32 `(entries,)`.
        positive: The sign of each entry, bool `(entries,)`.
        head: Numbers sent for each part, float32 `(parts, numbers)`.
    """
    words = tf.reshape(tf.bitcast(places * 2 + tf.cast(positive, tf.int32), tf.uint8), (-1,))
    lengths = 4 * tf.math.bincount(rows, minlength=head.shape[0], maxlength=head.shape[0], dtype=tf.int64)
    entries = tf.RaggedTensor.from_row_lengths(words, lengths, validate=False)
    return tf.concat([tf.RaggedTensor.from_tensor(to_bytes(head)), entries], 1) if head.shape[1] else entries


def decode_signs(message: tf.RaggedTensor, numbers: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return rows, places, signs and head from a message of `encode_signs` whose head has `numbers` columns."""
    parts = message.nrows()
    head = tf.reshape(
        tf.bitcast(tf.reshape(message[:, : 4 * numbers].flat_values, (-1, numbers, 4)), tf.float32), (parts, numbers)
    )
    entries = message[:, 4 * numbers :]
    words = tf.bitcast(tf.reshape(entries.flat_values, (-1, 4)), tf.uint32)
    places = tf.bitcast(tf.bitwise.right_shift(words, tf.constant(1, tf.uint32)), tf.int32)
    rows = tf.repeat(tf.range(tf.cast(parts, tf.int32)), tf.cast(entries.row_lengths(), tf.int32) // 4)
    return rows, places, words % 2 == 1, head
