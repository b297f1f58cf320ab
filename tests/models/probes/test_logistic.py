"""Logistic regression over ranks, beside scikit-learn's on all samples, and sums that prove equal weights."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from models.probes.solvers import agreed_sum, fit_logistic

L2 = 1e-2
SETTINGS = {"l2": L2, "max_iterations": 2000, "tolerance": 3e-8}


def alone(design, targets, *, task="single_label", **settings):
    """The fit of one rank with all samples."""
    return fit_logistic(design, targets, lambda values: values, task=task, rows=len(design), **{**SETTINGS, **settings})


def by_scikit_learn(features, targets, task):
    """Weights and intercepts as ours, `(features + 1, classes)`: with several labels a regression for each class."""
    labels = [targets.argmax(axis=1)] if task == "single_label" else targets.T
    fits = [LogisticRegression(C=1 / (L2 * len(features)), tol=1e-10, max_iter=20_000).fit(features, y) for y in labels]
    return np.hstack([np.vstack([fit.coef_.T, fit.intercept_]) for fit in fits])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("task", ["single_label", "multi_label"])
def test_it_is_the_regression_of_all_samples(on_ranks, part_of, digits, task, ranks):
    design, targets = digits
    if task == "multi_label":  # several labels: the digit, and whether it is even
        targets = np.c_[targets, targets[:, ::2].sum(axis=1)]
    expected = by_scikit_learn(design[:, :-1], targets, task)

    def fitted(rank, total):
        own = part_of(rank, ranks)
        return fit_logistic(design[own], targets[own], total, task=task, rows=len(design), **SETTINGS)

    found = on_ranks(ranks, fitted)
    for each in found:
        np.testing.assert_array_equal(each.weights, found[0].weights)
        assert each.converged
        assert each.residual <= 3e-8
    np.testing.assert_allclose(found[0].weights, expected, atol=5e-5)


def test_ranks_without_samples_change_nothing(on_ranks, digits):
    design, targets = digits[0][:3], digits[1][:3, :3]

    def fitted(rank, total):
        own = slice(rank, rank + 1)
        return fit_logistic(design[own], targets[own], total, task="single_label", rows=3, **SETTINGS)

    np.testing.assert_allclose(on_ranks(5, fitted)[4].weights, alone(design, targets).weights, atol=1e-5)


def test_a_class_without_positives_is_never_predicted(digits):
    others = np.arange(10) != 4
    design, targets = digits[0], digits[1] * others
    found = alone(design, targets, task="multi_label")
    assert np.isfinite(found.weights).all()
    assert expit(design @ found.weights)[:, 4].max() < 1e-6
    np.testing.assert_allclose(
        found.weights[:, others], alone(design, targets[:, others], task="multi_label").weights, atol=5e-5
    )


def test_a_start_from_another_penalty_is_the_same_fit_in_fewer_exchanges(digits):
    before = alone(*digits, l2=2 * L2, tolerance=1e-8)
    cold, warm = alone(*digits, tolerance=1e-8), alone(*digits, start=before.state, tolerance=1e-8)
    np.testing.assert_allclose(warm.weights, cold.weights, atol=1e-5)
    assert warm.exchanges < cold.exchanges


def test_too_few_iterations_are_told(digits):
    found = alone(*digits, max_iterations=3, tolerance=1e-9)
    assert not found.converged
    assert found.residual > 1e-9


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
