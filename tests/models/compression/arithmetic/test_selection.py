"""The largest elements, by a search of the best runs."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.arithmetic.selection import gather_once, largest_of_each, select_largest


@pytest.mark.parametrize("count", [1, 7, 200, 2048])
@pytest.mark.parametrize("levels", [None, 5])
def test_equals_a_stable_sort(count, levels):
    generator = np.random.default_rng(0)
    # With five levels nearly all elements are tied.
    values = generator.random((3, 2048)) if levels is None else generator.integers(0, levels, (3, 2048))
    values = values.astype(np.float32)
    expected = np.sort(np.argsort(-values, axis=1, kind="stable")[:, :count], axis=1)
    signs = np.where(generator.random(values.shape) < 0.5, -1, 1).astype(np.float32)
    np.testing.assert_array_equal(select_largest(tf.constant(signs * values), count), expected)


def test_count_may_be_a_tensor():
    values, traced = tf.random.stateless_uniform((2, 2048), (1, 2)), tf.function(select_largest)
    np.testing.assert_array_equal(traced(values, tf.constant(9)), np.sort(tf.math.top_k(values, 9).indices))


PLACES = np.arange(20000)
KINDS = {
    "normal": lambda values: values,
    "sparse": lambda values: values * (values > 2.5),
    "tied": lambda values: np.round(values),
    "sorted": lambda values: np.sort(values, axis=1),
    "one of zeros": lambda values: values * [[0], [1], [1], [1]],
    "fewer than wanted": lambda values: values * (PLACES % 7919 < [[50], [0], [70], [1]]),
    "none of the largest in the sample": lambda values: (values + 10 * (PLACES < 200)) * (PLACES % 61 > 0),
}


# Long enough for a sample; of the kinds, only the first lets it tell what the rows are like.
@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_of_any_kind(kind):
    values = KINDS[kind](np.abs(np.random.default_rng(0).normal(size=(4, 20000)))).astype(np.float32)
    for rows in (values, values[:1]):
        check(select_largest(tf.constant(rows), 200).numpy(), rows)


def test_another_number_of_each_row():
    sizes = np.random.default_rng(0).integers(0, 5, (4, 300)).astype(np.float32)  # most are tied
    counts = np.array([17, 0, 300, 1], np.int32)
    chosen = largest_of_each(tf.constant(sizes), tf.constant(counts)).numpy()
    for row, size, count in zip(chosen, sizes, counts, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), np.sort(np.argsort(-size, kind="stable")[:count]))


@pytest.mark.parametrize("elements", [2048, 20000])
@pytest.mark.parametrize("sign", [1, -1])
def test_size_may_be_that_of_one_sign(elements, sign):
    values = np.random.default_rng(0).normal(size=(3, elements)).astype(np.float32)
    places = tf.function(select_largest)(tf.constant(values), 100, lambda each: tf.nn.relu(sign * each))
    np.testing.assert_array_equal(places, np.sort(np.argsort(-sign * values, axis=1, kind="stable")[:, :100], axis=1))


def check(places, values):
    """Those of a stable sort, rising, and with them zeros, or the first again."""
    assert np.all((places >= 0) & (places < values.shape[1]))
    kept = gather_once(tf.constant(values), tf.constant(places)).numpy()
    for row, magnitudes, once in zip(places, values, kept, strict=True):
        count = min(len(row), np.count_nonzero(magnitudes))
        expected = np.argsort(-magnitudes, kind="stable")[:count]
        np.testing.assert_array_equal(row[once > 0], np.sort(expected))
        np.testing.assert_array_equal(once[once > 0], magnitudes[np.sort(expected)])
