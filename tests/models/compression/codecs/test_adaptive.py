"""Adaptive quantisation: the extremes of either sign as their means."""

import numpy as np
import pytest

from models.compression.codecs.adaptive import AdaptiveQuantiser
from models.compression.schemes.piecewise import PiecewiseConstant


def test_by_hand(encode):
    # Of 4 positive elements half are 2, of 3 negative ones half is 2, rounded up.
    message, remainder, restored = encode(AdaptiveQuantiser(PiecewiseConstant(0.5)), [5, 1, 3, 2, -1, -9, -5, 0])
    np.testing.assert_array_equal([restored, remainder], [[4, 0, 4, 0, 0, -7, -7, 0], [1, 1, -1, 2, -1, -2, 2, 0]])
    assert message.row_lengths().numpy().tolist() == [8 + 4 * 4]


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_stated_part_passes_and_keeps_its_sum(density, encode):
    values = np.random.default_rng(0).normal(0.2, 1, 4096).astype(np.float32)
    _, _, restored = encode(AdaptiveQuantiser(PiecewiseConstant(density)), values)
    for sign in (1, -1):
        group, passed = sign * values > 0, sign * restored > 0
        assert np.count_nonzero(passed) == np.ceil(np.float32(density) * np.count_nonzero(group))
        assert np.all(group[passed])
        assert np.min(sign * values[passed]) >= np.max(sign * values[group & ~passed])
        np.testing.assert_allclose(restored[passed].sum(), values[passed].sum(), rtol=1e-5)


def test_all_of_one_sign(encode):
    for values, density, expected in (
        (np.arange(1, 17), 0.25, [0] * 12 + [14.5] * 4),
        (-np.arange(1, 129), 0.01, [0] * 127 + [-128]),  # 1.28 of 128
    ):
        np.testing.assert_array_equal(encode(AdaptiveQuantiser(PiecewiseConstant(density)), values)[2], expected)
