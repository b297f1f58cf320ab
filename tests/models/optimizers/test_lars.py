"""LARS against steps by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.sections.optimizers import LARSConfig
from models.optimizers.lars import LARS


def make_lars(learning_rate, **settings):
    """With the configuration's defaults."""
    return LARS(learning_rate, **{**LARSConfig().arguments(), **settings})


def variable(values, name="w"):
    return keras.Variable(np.array(values, np.float32), name=name)


def step(optimizer, weights, gradient):
    optimizer.apply([tf.constant(gradient, tf.float32)], [weights])
    return weights.numpy()


def test_one_step_by_hand():
    weights = variable([3.0, 4.0])
    optimizer = make_lars(0.5, momentum=0.9, nesterov=False, weight_decay=0.1, trust_coefficient=0.01)
    # |w| = 5, |g| = 10: ratio = 0.01 * 5 / (10 + 0.1 * 5) = 0.05 / 10.5
    # update = 0.5 * ratio * ((6, 8) + 0.1 * (3, 4)) = 0.5 * 0.05 / 10.5 * (6.3, 8.4) = (0.015, 0.02)
    np.testing.assert_allclose(step(optimizer, weights, [6.0, 8.0]), [2.985, 3.98], rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "gradient", "decay", "expected"),
    [
        ([0.0, 0.0], [1.0, 2.0], 0.1, [-0.5, -1.0]),
        ([2.0], [0.0], 0.1, [1.9]),  # update = 0.5 * 1 * (0 + 0.1 * 2)
        ([2.0], [0.0], 0.0, [2.0]),
    ],
)
def test_zero_weights_or_a_zero_gradient_take_ratio_one(weights, gradient, decay, expected):
    np.testing.assert_allclose(
        step(make_lars(0.5, nesterov=False, weight_decay=decay), variable(weights), gradient), expected
    )


def test_rate_can_change_at_every_step_of_a_compiled_function():
    eager, traced = variable([[3.0, 4.0]]), variable([[3.0, 4.0]])
    eager_optimizer, optimizer = make_lars(1.0, trust_coefficient=0.1), make_lars(1.0, trust_coefficient=0.1)
    optimizer.build([traced])

    @tf.function(jit_compile=True)
    def train_step(gradient):
        optimizer.apply([gradient], [traced])

    for rate in (0.5, 1.0, 0.1):
        optimizer.learning_rate.assign(rate)
        train_step(tf.constant([[1.0, -1.0]]))
        eager_optimizer.learning_rate = rate
        step(eager_optimizer, eager, [[1.0, -1.0]])
    np.testing.assert_allclose(traced, eager, rtol=1e-6)
    assert train_step.experimental_get_tracing_count() == 1
