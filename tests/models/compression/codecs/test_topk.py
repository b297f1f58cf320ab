"""Gradient dropping: the largest elements now, the others later."""

import numpy as np
import tensorflow as tf

from models.compression.codecs.topk import TopKSparsifier
from models.compression.schemes.piecewise import PiecewiseConstant


def test_by_hand(encode):
    message, remainder, restored = encode(TopKSparsifier(PiecewiseConstant(0.25)), [1, -5, 2, 5, 0, 0, 5, 0])
    # Of equal magnitudes the first.
    np.testing.assert_array_equal([restored, remainder], [[0, -5, 0, 5, 0, 0, 0, 0], [1, 0, 2, 0, 0, 0, 5, 0]])
    assert [(*part.shape, part.dtype) for part in message] == [(1, 2, tf.int32), (1, 2, tf.float32)]


def test_elements_that_are_zero_are_sent_as_nothing(encode):
    values = np.zeros(20000, np.float32)
    values[[5, 700, 19999]] = [3, -4, 1]
    message, remainder, restored = encode(TopKSparsifier(PiecewiseConstant(0.001)), values)
    assert message[1].shape == (1, 20)
    np.testing.assert_array_equal([restored, remainder], [values, np.zeros_like(values)])


def test_owners_pass_on_whole_what_two_ranks_send(make_ring, random_gradients):
    # Long enough for a sample of each rank's part.
    gradients, ring = random_gradients(2, ((100, 300),)), make_ring(2, "topk", {"density": 0.01})
    assert np.count_nonzero(ring.exchange(gradients)[0]) > 0.015 * 30_000
    assert all(np.all(residual == 0) for residual in ring.state("owner_residual/gradient_0"))
    once = make_ring(2, "topk", {"density": 0.01, "owner_factor": 1})
    assert np.count_nonzero(once.exchange(gradients)[0]) == 0.01 * 30_000
    assert any(np.any(residual) for residual in once.state("owner_residual/gradient_0"))
