"""Sums that prove that all ranks are at the same weights."""

import numpy as np
import pytest

from models.probes.solvers import agreed_sum


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_ranks_with_equal_weights_get_the_sum(on_ranks, ranks):
    weights = np.random.default_rng(0).standard_normal(50)
    for each in on_ranks(ranks, lambda rank, total: agreed_sum(np.array([rank + 0.5, 1.0]), weights, total)):
        np.testing.assert_array_equal(each, [ranks * (ranks - 1) / 2 + ranks / 2, ranks])


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_whose_weights_differ_in_one_bit_is_found_out_by_all(on_ranks, odd):
    def with_an_odd_one(rank, total):
        weights = np.full(50, 0.1)
        if rank == odd:
            weights[17] = np.nextafter(0.1, 1)
        with pytest.raises(RuntimeError, match="the weights of the probe are not the same on all 3 ranks"):
            agreed_sum(np.zeros(4), weights, total)
        return True

    assert on_ranks(3, with_an_odd_one) == [True] * 3
