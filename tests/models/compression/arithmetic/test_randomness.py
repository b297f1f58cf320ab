"""Counter-based random numbers: even, independent, a function of the key."""

import numpy as np
import tensorflow as tf

from models.compression.arithmetic.randomness import fold_in, make_key, normal, uniform


def test_uniform_numbers_are_even():
    count = 1 << 18
    draws = uniform((count,), make_key(1)).numpy()
    assert 0 <= draws.min() <= draws.max() < 1
    observed, _ = np.histogram(draws, 64, (0, 1))
    expected = count / 64
    # Chi-squared with 63 degrees of freedom: mean 63, deviation sqrt(126) = 11.
    assert 63 - 5 * 11 < np.sum((observed - expected) ** 2 / expected) < 63 + 5 * 11


def test_neighbours_and_keys_are_uncorrelated():
    count = 1 << 16
    one = uniform((count,), make_key(1, 0)).numpy() - 0.5
    for other in (
        np.roll(one, 1),
        np.roll(one, 16),
        uniform((count,), make_key(1, 1)).numpy() - 0.5,
        uniform((count,), make_key(2, 0)).numpy() - 0.5,
        uniform((count,), fold_in(make_key(1, 0), 0)).numpy() - 0.5,
    ):
        # The deviation of a correlation of independent numbers is 1 / sqrt(count).
        assert abs(12 * np.mean(one * other)) < 5 / np.sqrt(count)


def test_keys_of_steps_tensors_and_ranks_are_distinct():
    assert len({tuple(make_key(0, *place).numpy()) for place in np.ndindex(5, 5, 5)}) == 5**3


def test_same_key_same_numbers_compiled_or_not():
    key = make_key(3, 4)
    np.testing.assert_array_equal(
        uniform((100,), key), tf.function(lambda key: uniform((100,), key), jit_compile=True)(key)
    )


def test_normal_moments():
    count = 1 << 16
    draws = normal((count,), make_key(7)).numpy().astype(np.float64)
    moments, deviations = [np.mean(draws**power) for power in (1, 2, 4)], np.sqrt([1, 2, 96])
    assert np.all(np.abs(np.array(moments) - [0, 1, 3]) < 5 / np.sqrt(count) * deviations)
