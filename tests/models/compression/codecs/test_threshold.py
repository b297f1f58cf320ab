"""Threshold quantisation: tau, minus tau or nothing."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.codecs.threshold import ThresholdQuantiser


def test_by_hand():
    quantiser = ThresholdQuantiser(0.5)
    message, remainder = quantiser.encode(tf.constant([[0.4, 0.5, -1.7, -0.1], [0, 0, 0, 0.6]]), None, None, None)
    assert message.row_lengths().numpy().tolist() == [8, 4]
    np.testing.assert_array_equal(quantiser.decode(message, (4,)), [[0, 0.5, -0.5, 0], [0, 0, 0, 0.5]])
    np.testing.assert_allclose(remainder, [[0.4, 0, -1.2, -0.1], [0, 0, 0, 0.1]], atol=1e-7)


def test_large_gradients_leave_tau_a_step(make_ring):
    ring = make_ring(2, "threshold", {"tau": 0.5})
    np.testing.assert_array_equal(np.unique([ring.alike(np.full((1, 4), 0.6, np.float32))[0] for _ in range(5)]), [0.5])
    np.testing.assert_allclose(ring.state("residual/gradient_0")[0], 5 * (0.6 - 0.5), rtol=1e-5)


@pytest.mark.parametrize("count", [0, 10, 100])
def test_bytes_follow_the_data(count, make_ring):
    ring, gradient = make_ring(2, "threshold", {"tau": 0.5}), np.zeros((16, 16), np.float32)
    gradient.flat[:count] = 0.5
    ring.alike(gradient)
    # 4 bytes of length a part in both stages, for 2 ranks; then 4 bytes an element in both stages, each worth half.
    # All elements are in rank 0's half, whose owner sends them to all: 4 * count there, and nothing from the other.
    assert ring.exchanges[0].metrics().payload_bytes == 8 + count * 4 // 2 + count * 4
