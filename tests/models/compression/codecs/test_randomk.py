"""Random-k: the same places everywhere."""

import numpy as np
import pytest

SHAPE = (40, 30)


def test_sends_the_mean_at_a_few_places_and_nothing_elsewhere(make_ring, random_gradients, make_codec):
    gradients = random_gradients(3, (SHAPE,))
    ring = make_ring(3, make_codec("randomk", density=0.1))
    (result,) = ring.exchange(gradients)
    sent = result != 0
    assert np.count_nonzero(sent) == 120
    np.testing.assert_allclose(result[sent], np.mean([each[0] for each in gradients], axis=0)[sent], rtol=1e-5)
    assert ring.ranks[0].calls[0][1][0][1] == (120,)  # 4 bytes each and no places
    (second,) = ring.exchange(gradients)
    assert np.count_nonzero(sent & (second != 0)) < 60


def test_unbiased_without_error_feedback(make_ring, make_codec):
    gradient = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    ring = make_ring(1, make_codec("randomk", density=0.1, error_feedback=False))
    draws = np.stack([ring.exchange([[gradient]])[0] for _ in range(200)]).astype(np.float64)
    error = np.abs(draws.mean(axis=0) - gradient)
    # An element is sent, ten times as large, in one of ten draws: variance 9 g^2.
    assert np.all(error <= 5 * 3 * np.abs(gradient) / np.sqrt(200))


def test_every_element_is_sent_before_long(make_ring, make_codec):
    ring = make_ring(1, make_codec("randomk", density=0.25))
    gradient = np.ones((8, 8), np.float32)
    sent = sum(ring.exchange([[gradient]])[0] for _ in range(30))
    assert sent.min() > 0


def test_full_density_is_exact(make_ring, random_gradients, make_codec):
    gradients = random_gradients(2, (SHAPE,))
    np.testing.assert_allclose(
        make_ring(2, make_codec("randomk", density=1.0)).exchange(gradients)[0],
        (gradients[0][0] + gradients[1][0]) / 2,
        rtol=1e-5,
        atol=1e-7,
    )


def test_density_by_step(make_ring, random_gradients, make_codec):
    ring = make_ring(2, make_codec("randomk", density=0.01, density_schedule=[(1, 0.5)]))
    counts = [np.count_nonzero(ring.exchange(random_gradients(2, (SHAPE,)))[0]) for _ in range(2)]
    assert counts == [600, 12]


def test_density_out_of_range(make_codec):
    with pytest.raises(ValueError, match="density must be above 0"):
        make_codec("randomk", density=0)
