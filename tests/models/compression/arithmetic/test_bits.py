"""Packing to the width of the numbers."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.arithmetic.bits import from_bytes, pack, spread, to_bytes, unpack


def test_signs_by_hand():
    # Elements 0 .. 7 and 8 .. 15 alternate: byte i holds elements i, i + 2, i + 4 ...
    np.testing.assert_array_equal(
        pack(tf.constant([[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]], tf.uint8), 1), [[0b10000001, 0b10000000]]
    )


@pytest.mark.parametrize("width", range(1, 9))
def test_round_trip_takes_width_bits(width):
    codes = np.random.default_rng(0).integers(0, 2**width, (3, 48), np.uint8)
    packed = pack(tf.constant(codes), width)
    assert packed.shape == (3, 48 * width // 8)
    np.testing.assert_array_equal(unpack(packed, width), codes)


def test_spread_bytes_are_the_runs():
    signs = np.random.default_rng(0).integers(0, 2, (3, 48, 5), np.uint8)
    np.testing.assert_array_equal(tf.reshape(spread(pack(tf.constant(signs), 1)), (3, 48, 5)), signs == 1)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.int32, tf.uint8])
def test_numbers_as_bytes(dtype):
    numbers = tf.cast(tf.constant([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]), dtype)
    raw = to_bytes(numbers)
    assert raw.shape == (2, 4 * dtype.size)
    np.testing.assert_array_equal(from_bytes(raw, dtype, (2, 2)), numbers)
