"""LAMB against the paper, written again in float64 numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.sections.optimizers import LAMBConfig
from models.optimizers.lamb import LAMB


def by_the_paper(w, steps, *, decay, adapts):
    """Algorithm 2, with beta_1 = 0.8, beta_2 = 0.95 and epsilon = 1e-4."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (rate, g) in enumerate(steps, 1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        r = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-4)
        u = r + decay * w
        ratio = np.linalg.norm(w) / np.linalg.norm(u) if adapts else 1.0
        w = w - rate * ratio * u
    return w


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 2e-5)])
def test_fifty_steps_with_a_rate_that_rises_and_falls(dtype, tolerance, rates, steps_are_those_of):
    config = LAMBConfig(beta_1=0.8, beta_2=0.95, epsilon=1e-4, weight_decay=0.1)
    steps_are_those_of(config, by_the_paper, rates, dtype=dtype, tolerance=tolerance)


def test_variables_of_zeros_move():
    weights, optimizer = keras.Variable([0.0, 0.0], name="w"), LAMB(0.0, **LAMBConfig(weight_decay=0.1).arguments())
    optimizer.learning_rate = 0.5
    optimizer.apply([tf.constant([1.0, -2.0])], [weights])
    # Adam's first step is the sign of the gradient.
    np.testing.assert_allclose(weights, [-0.5, 0.5], rtol=1e-5)
