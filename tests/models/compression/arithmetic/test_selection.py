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
    values = tf.random.stateless_uniform((2, 2048), (1, 2))
    traced = tf.function(select_largest)
    np.testing.assert_array_equal(traced(values, tf.constant(9)), np.sort(tf.math.top_k(values, 9).indices))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["normal", "sparse", "tied", "sorted", "zeros", "late"])
def test_long_rows_of_any_kind(kind, rows):
    # Long enough for a sample; of the kinds, only the first lets it tell what the rows are like.
    generator = np.random.default_rng(0)
    values = np.abs(generator.normal(size=(rows, 20000))).astype(np.float32)
    match kind:
        case "sparse":
            values *= generator.random(values.shape) < 0.01
        case "tied":
            values = np.round(values)
        case "sorted":
            values = np.sort(values, axis=1)
        case "zeros":
            values[0] = 0
        case "late":
            # None of the largest is in the sample.
            values[:, 1:200] += 10
            values[:, ::61] = 0
    check(select_largest(tf.constant(values), 200).numpy(), values)


def test_rows_with_fewer_elements_than_are_wanted():
    generator = np.random.default_rng(0)
    values = np.zeros((4, 20000), np.float32)
    for row, count in enumerate((150, 0, 200, 1)):
        values[row, generator.choice(20000, count, replace=False)] = generator.random(count) + 1
    check(select_largest(tf.constant(values), 200).numpy(), values)


@pytest.mark.parametrize("rows", [1, 4])
def test_another_number_of_each_row(rows):
    sizes = np.random.default_rng(0).integers(0, 5, (rows, 300)).astype(np.float32)  # most are tied
    counts = np.array([17, 0, 300, 1][:rows], np.int32)
    chosen = largest_of_each(tf.constant(sizes), tf.constant(counts)).numpy()
    for row, size, count in zip(chosen, sizes, counts, strict=True):
        expected = np.sort(np.argsort(-size, kind="stable")[:count])
        np.testing.assert_array_equal(np.flatnonzero(row), expected)


@pytest.mark.parametrize("elements", [2048, 20000])
def test_size_may_be_that_of_one_sign(elements):
    values = np.random.default_rng(0).normal(size=(3, elements)).astype(np.float32)
    for sign in (1, -1):
        size = tf.nn.relu if sign == 1 else lambda each: tf.nn.relu(-each)
        places = tf.function(select_largest)(tf.constant(values), 100, size)
        expected = np.sort(np.argsort(-sign * values, axis=1, kind="stable")[:, :100], axis=1)
        np.testing.assert_array_equal(places, expected)


def check(places, values):
    """Those of a stable sort, rising, and with them zeros, or the first again."""
    assert np.all((places >= 0) & (places < values.shape[1]))
    kept = gather_once(tf.constant(values), tf.constant(places)).numpy()
    for row, magnitudes, once in zip(places, values, kept, strict=True):
        count = min(len(row), np.count_nonzero(magnitudes))
        expected = np.argsort(-magnitudes, kind="stable")[:count]
        np.testing.assert_array_equal(row[once > 0], np.sort(expected))
        np.testing.assert_array_equal(once[once > 0], magnitudes[np.sort(expected)])
