"""Half and brain floats."""

import numpy as np
import pytest
import tensorflow as tf


def through(ring, *values):
    return ring.exchange([[np.array([values], np.float32)]] * ring.size)[0][0]


@pytest.mark.parametrize("settings", [{}, {"sum_in_float32": True}])
def test_fp16_rounds_to_eleven_bits_ties_to_even(settings, make_ring):
    np.testing.assert_array_equal(through(make_ring(1, "fp16", settings), 2047, 2049, 2051), [2047, 2048, 2052])


def test_fp16_range(make_ring, make_codec):
    result = through(make_ring(1, make_codec("fp16")), 65504, 6e-8, 1e-8)
    np.testing.assert_allclose(result, [65504, 2**-24, 0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="codec fp16: these means of finite gradients are not"):
        through(make_ring(1, make_codec("fp16")), 1e5)


def test_bf16_rounds_to_eight_bits_and_has_the_range_of_float32(make_ring, make_codec):
    np.testing.assert_array_equal(through(make_ring(1, make_codec("bf16")), 255, 257, 259), [255, 256, 260])
    np.testing.assert_allclose(through(make_ring(2, make_codec("bf16")), 1e38, 1e-37), [1e38, 1e-37], rtol=2**-8)


def test_prescale_shifts_the_window(make_ring, make_codec):
    tiny = through(make_ring(2, make_codec("fp16", prescale=2.0**16)), 1e-8, 0.5)
    np.testing.assert_allclose(tiny, [1e-8, 0.5], rtol=2**-10)
    large = through(make_ring(2, make_codec("fp16", prescale=2.0**-8, sum_in_float32=True)), 1e6, 1e7)
    np.testing.assert_allclose(large, [1e6, 1e7], rtol=2**-10)
    np.testing.assert_allclose(through(make_ring(2, make_codec("bf16", prescale=2.0**64)), 1e-30), [1e-30], rtol=2**-8)


def test_large_values_do_not_overflow_in_the_sum_of_halves(make_ring, make_codec):
    ring = make_ring(4, make_codec("fp16"))
    np.testing.assert_array_equal(through(ring, 40000.0), [40000.0])  # their sum, 160000, is beyond 65504
    assert ring.ranks[0].calls[0][1][0][0] == tf.float16


def test_error_feedback_sends_what_the_rounding_lost(make_ring, make_codec):
    ring = make_ring(1, make_codec("bf16", error_feedback=True))
    total = sum(through(ring, 257.0)[0] for _ in range(16))
    assert total / 16 == pytest.approx(257, abs=0.3)
    plain = make_ring(1, make_codec("bf16"))
    assert sum(through(plain, 257.0)[0] for _ in range(16)) / 16 == 256


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_prescale_must_be_positive(name, make_codec):
    with pytest.raises(ValueError, match="prescale must be positive, got 0"):
        make_codec(name, prescale=0)
