"""Norms along the last axis, written so that XLA reads memory in order."""

from functools import reduce

import tensorflow as tf


def largest_magnitude(values: tf.Tensor) -> tf.Tensor:
    """Return max |v_i| over the last axis, which is kept with length 1; its length is a multiple of 8."""
    # XLA reads memory in order for an elementwise maximum, but not for a maximum along the last axis.
    eighth = reduce(tf.maximum, tf.split(tf.abs(values), 8, -1))
    return tf.reduce_max(eighth, -1, keepdims=True)


def euclidean_norm(values: tf.Tensor) -> tf.Tensor:
    """Return sqrt(sum v_i^2) over the last axis, which is kept with length 1; its length is a multiple of 8.

    The squares of huge and tiny numbers stay within float32's range, because all are divided by the largest first.
    """
    largest = largest_magnitude(values)
    eighth = tf.add_n([tf.square(tf.math.divide_no_nan(run, largest)) for run in tf.split(values, 8, -1)])
    return largest * tf.sqrt(tf.reduce_sum(eighth, -1, keepdims=True))
