"""The largest elements, by a search of the best runs."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.selection import select_largest


@pytest.mark.parametrize("count", [1, 7, 200, 2048])
@pytest.mark.parametrize("levels", [None, 5])
def test_equals_a_stable_sort(count, levels):
    generator = np.random.default_rng(0)
    # With five levels nearly all elements are tied.
    values = generator.random((3, 2048)) if levels is None else generator.integers(0, levels, (3, 2048))
    values = values.astype(np.float32)
    expected = np.argsort(-values, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(select_largest(tf.constant(values), count), expected)


def test_count_may_be_a_tensor():
    values = tf.random.stateless_uniform((2, 2048), (1, 2))
    traced = tf.function(select_largest)
    np.testing.assert_array_equal(traced(values, tf.constant(9)), tf.math.top_k(values, 9).indices)
