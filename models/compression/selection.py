"""Which elements are the largest, and sending elements by their places."""

import tensorflow as tf

_RUN = 16


def select_largest(magnitudes: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Places of the `count` largest in each row, int32 `(rows, count)`, largest first, ties by place.

    Exact: the largest elements lie in those runs of 16 that have the largest maxima, so only these runs are searched.
    """
    rows, elements = magnitudes.shape
    if elements % _RUN or elements < 64 * _RUN:
        return tf.math.top_k(magnitudes, count).indices
    runs = tf.reshape(magnitudes, (rows, elements // _RUN, _RUN))
    maxima = tf.reduce_max(runs, 2)
    # In order of place, so that ties among the candidates are broken by place.
    best = tf.sort(tf.math.top_k(maxima, tf.minimum(count, elements // _RUN), sorted=False).indices, axis=1)
    candidates = tf.gather(runs, best, batch_dims=1)
    chosen = tf.math.top_k(tf.reshape(candidates, (rows, -1)), count).indices
    return tf.gather(best, chosen // _RUN, batch_dims=1) * _RUN + chosen % _RUN


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
