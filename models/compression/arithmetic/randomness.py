"""Random numbers that are a pure function of a key: no state to save, and any order of evaluation."""

import math
from functools import reduce

import tensorflow as tf

from models.layers.drop import mix


def make_key(*numbers: int | tf.Tensor) -> tf.Tensor:
    """Return a key of two int32 from integers."""
    return reduce(fold_in, numbers, tf.constant([0x243F6A88, 0x13198A2E], tf.int32))


def fold_in(key: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """Return a new key from a key and an integer."""
    return _fold_in(key, tf.cast(number, tf.uint32))


# It is one operation in a graph that makes hundreds of keys; inlined, it would be fifty.
@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _fold_in(key: tf.Tensor, word: tf.Tensor) -> tf.Tensor:
    words = tf.bitcast(key, tf.uint32)
    first = mix(words[0] ^ word)
    second = mix(words[1] + mix(word ^ tf.constant(0x9E3779B9, tf.uint32)) + first)
    return tf.bitcast(tf.stack([first, second]), tf.int32)


def uniform(shape: tuple[int, ...], key: tf.Tensor) -> tf.Tensor:
    """Return uniform float32 in [0, 1), multiples of 2**-24.

    A counter passes twice through a 32-bit mixing function, each time combined with a word of the key. The numbers are
    not for cryptography. `tf.random.stateless_uniform`, compiled by XLA for a CPU, takes ten seconds for 24 million
    numbers; this function takes a fraction of a second.
    """
    words = tf.bitcast(key, tf.uint32)
    counter = tf.cast(tf.range(math.prod(shape)), tf.uint32)
    bits = mix(mix(counter ^ words[0]) + words[1])
    # The conversion of signed integers is a vector instruction; that of unsigned integers is not.
    small = tf.bitcast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.int32)
    return tf.reshape(tf.cast(small, tf.float32) * 2.0**-24, shape)


def normal(shape: tuple[int, ...], key: tf.Tensor) -> tf.Tensor:
    """Return standard normal float32, by the Box-Muller transform."""
    radius = tf.sqrt(-2.0 * tf.math.log(1.0 - uniform(shape, fold_in(key, 1))))
    return radius * tf.cos(2 * math.pi * uniform(shape, fold_in(key, 2)))
