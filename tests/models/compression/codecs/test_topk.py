"""Gradient dropping: the largest elements now, the others later."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.codecs.topk import TopKSparsifier
from models.compression.schemes.piecewise import PiecewiseConstant


def encode(values, density):
    quantiser = TopKSparsifier(PiecewiseConstant(density))
    parts = tf.constant(values, tf.float32)[None]
    message, remainder = quantiser.encode(parts, None, tf.constant(0), None)
    return message, remainder.numpy()[0], quantiser.decode(message, tuple(parts.shape[1:])).numpy()[0]


def test_by_hand():
    message, remainder, restored = encode([1, -5, 2, 5, 0, 0, 5, 0], 0.25)
    # Of equal magnitudes the first.
    np.testing.assert_array_equal(restored, [0, -5, 0, 5, 0, 0, 0, 0])
    np.testing.assert_array_equal(remainder, [1, 0, 2, 0, 0, 0, 5, 0])
    assert [(*part.shape, part.dtype) for part in message] == [(1, 2, tf.int32), (1, 2, tf.float32)]


def test_elements_that_are_zero_are_sent_as_nothing():
    values = np.zeros(20000, np.float32)
    values[[5, 700, 19999]] = [3, -4, 1]
    message, remainder, restored = encode(values, 0.001)
    assert message[1].shape == (1, 20)
    np.testing.assert_array_equal(restored, values)
    np.testing.assert_array_equal(remainder, np.zeros_like(values))


def test_owners_pass_on_whole_what_two_ranks_send(make_ring, random_gradients):
    # Long enough for a sample of each rank's part.
    gradients = random_gradients(2, ((100, 300),))
    ring = make_ring(2, "topk", {"density": 0.01})
    mean = ring.exchange(gradients)[0]
    assert np.count_nonzero(mean) > 0.015 * mean.size
    assert all(np.all(residual == 0) for residual in ring.state("owner_residual/gradient_0"))
    once = make_ring(2, "topk", {"density": 0.01, "owner_factor": 1})
    assert np.count_nonzero(once.exchange(gradients)[0]) == 0.01 * mean.size
    assert any(np.any(residual) for residual in once.state("owner_residual/gradient_0"))


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 1.0])
def test_contraction_is_at_least_the_density(density):
    values = np.random.default_rng(0).normal(size=1 << 14).astype(np.float32)
    _, remainder, restored = encode(values, density)
    np.testing.assert_array_equal(remainder + restored, values)
    assert np.count_nonzero(restored) == round(density * len(values))
    assert np.sum(remainder**2) <= (1 - density) * np.sum(values**2)


def test_everything_travels_in_the_end(make_ring, random_gradients):
    ring = make_ring(2, "topk", {"density": 0.1})
    gradients = random_gradients(2, ((40, 30),))
    zeros = [[np.zeros((40, 30), np.float32)]] * 2
    total = ring.exchange(gradients)[0]
    for _ in range(30):
        total = total + ring.exchange(zeros)[0]
    np.testing.assert_allclose(total, np.mean([each[0] for each in gradients], axis=0), rtol=1e-5, atol=1e-6)


def test_density_by_step(make_ring, random_gradients, make_codec):
    ring = make_ring(1, make_codec("topk", density=1 / 64, density_schedule=[(1, 0.5), (2, 0.125)]))
    counts = [np.count_nonzero(ring.exchange(random_gradients(1, ((16, 16),), seed=step))[0]) for step in range(4)]
    assert counts == [128, 32, 4, 4]


def test_owner_factor_out_of_range(make_codec):
    with pytest.raises(ValueError, match=r"owner_factor must be at least 1, got 0\.5"):
        make_codec("topk", owner_factor=0.5)


@pytest.mark.parametrize("density", [0.0, 1.5])
def test_density_out_of_range(density, make_codec):
    with pytest.raises(ValueError, match=f"density must be above 0 and at most 1, got {density}"):
        make_codec("topk", density=density)
