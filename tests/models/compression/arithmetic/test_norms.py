"""Norms of huge, tiny and zero vectors."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.arithmetic.norms import euclidean_norm, largest_magnitude


@pytest.mark.parametrize("scale", [1e-30, 0.0, 1.0, 1e30])
def test_norms_of_any_magnitude(scale):
    values = np.random.default_rng(0).normal(size=(3, 2, 64))
    scaled = tf.constant(scale * values, tf.float32)
    np.testing.assert_allclose(
        euclidean_norm(scaled), scale * np.linalg.norm(values, axis=-1, keepdims=True), rtol=1e-6
    )
    np.testing.assert_allclose(largest_magnitude(scaled), scale * np.abs(values).max(-1, keepdims=True), rtol=1e-6)
