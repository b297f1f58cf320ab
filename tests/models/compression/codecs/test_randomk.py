"""Random-k: the same places everywhere; and the density of sparsifiers by step."""

import numpy as np
import pytest

SHAPE = (40, 30)


def test_sends_the_mean_at_a_few_places_and_nothing_elsewhere(make_ring, random_gradients):
    gradients, ring = random_gradients(3, (SHAPE,)), make_ring(3, "randomk", {"density": 0.1})
    (result,) = ring.exchange(gradients)
    sent = result != 0
    assert np.count_nonzero(sent) == 120
    np.testing.assert_allclose(result[sent], np.mean([each[0] for each in gradients], axis=0)[sent], rtol=1e-5)
    assert ring.ranks[0].calls[0][1][0][1] == (120,)  # 4 bytes each and no places
    assert np.count_nonzero(sent & (ring.exchange(gradients)[0] != 0)) < 60


@pytest.mark.long
def test_unbiased_without_error_feedback(make_ring):
    gradient = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    ring = make_ring(1, "randomk", {"density": 0.1, "error_feedback": False})
    draws = np.stack([ring.alike(gradient)[0] for _ in range(200)]).astype(np.float64)
    assert draws.any(axis=0).all(), "every element is sent before long"
    # An element is sent, ten times as large, in one of ten draws: variance 9 g^2.
    assert np.all(np.abs(draws.mean(axis=0) - gradient) <= 5 * 3 * np.abs(gradient) / np.sqrt(200))


@pytest.mark.parametrize("name", ["randomk", "topk"])
def test_density_by_step(name, make_ring, random_gradients):
    ring = make_ring(1, name, {"density": 1 / 64, "density_schedule": [(1, 0.5), (2, 0.125)]})
    counts = [np.count_nonzero(ring.exchange(random_gradients(1, ((16, 16),), seed=step))[0]) for step in range(4)]
    assert counts == [128, 32, 4, 4]
