"""Scaled sign with error feedback."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.codecs.scaled_sign import ScaledSignQuantiser


def test_mean_magnitude_by_hand(encode):
    message, remainder, restored = encode(ScaledSignQuantiser("mean"), [1, -2, 3, -4, 0, 0, 2, -4])
    assert [(*part.shape, part.dtype) for part in message] == [(1, 1, tf.uint8), (1, 1, tf.float32)]
    np.testing.assert_array_equal([restored, remainder], [[2, -2, 2, -2, 2, 2, 2, -2], [-1, 0, 1, -2, -2, -2, 0, -2]])
    # Padding has no share in the scale.
    np.testing.assert_array_equal(encode(ScaledSignQuantiser("mean"), [1, -3, *[0] * 6], real=2)[2][:2], [2, -2])


@pytest.mark.parametrize(("draw", "delta"), [("normal", 2 / np.pi), ("laplace", 0.5)])
def test_contraction_is_exactly_as_stated(draw, delta, encode):
    values = getattr(np.random.default_rng(0), draw)(size=1 << 16).astype(np.float32)
    _, remainder, _ = encode(ScaledSignQuantiser("mean"), values)
    kept = 1 - np.sum(remainder.astype(np.float64) ** 2) / np.sum(values.astype(np.float64) ** 2)
    stated = np.sum(np.abs(values), dtype=np.float64) ** 2 / (len(values) * np.sum(values.astype(np.float64) ** 2))
    assert kept == pytest.approx(stated, rel=1e-4)
    assert stated == pytest.approx(delta, rel=0.02)  # (E|x|)^2 / E x^2 of the distribution
