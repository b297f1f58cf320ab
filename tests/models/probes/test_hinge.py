"""Support-vector machines over ranks: the duality gap, and scikit-learn's objective."""

import numpy as np
import pytest
from sklearn.svm import LinearSVC

from models.probes.solvers import fit_hinge

L2 = 0.1


def alone(design, targets, **settings):
    """The fit of one rank with all samples."""
    settings = {"l2": L2, "max_rounds": 1000, "tolerance": 1e-3, **settings}
    return fit_hinge(design, targets, lambda values: values, rank=0, ranks=1, rows=len(design), **settings)


def primal(design, targets, weights):
    """The objective of each class, as the docstring states it."""
    margins = (2 * targets - 1) * (design @ weights)
    return L2 / 2 * (weights**2).sum(axis=0) + np.maximum(0, 1 - margins).mean(axis=0)


def dual(design, targets, duals):
    weights = design.T @ (duals * (2 * targets - 1)) / (L2 * len(design))
    return duals.mean(axis=0) - L2 / 2 * (weights**2).sum(axis=0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_gap_falls_below_the_tolerance_and_bounds_the_objective(on_ranks, part_of, digits, ranks):
    (design, targets), tolerance = digits, 1e-3

    def fitted(rank, total):
        own, place = part_of(rank, ranks), {"rank": rank, "ranks": ranks, "rows": len(design)}
        return fit_hinge(design[own], targets[own], total, **place, l2=L2, max_rounds=400, tolerance=tolerance)

    found = on_ranks(ranks, fitted)
    for each in found:
        np.testing.assert_array_equal(each.weights, found[0].weights)
        assert each.converged
        assert each.exchanges < 400
    duals = np.concatenate([each.state for each in found])
    assert 0 <= duals.min() <= duals.max() <= 1
    values = primal(design, targets, found[0].weights)
    gaps = values - dual(design, targets, duals)
    assert gaps.min() >= 0
    # The gap that it tells is the real one, of the weights that it gives.
    assert gaps.max() == pytest.approx(found[0].residual, abs=1e-9)
    assert gaps.max() <= tolerance
    for column, y in enumerate(targets.T):
        # LIBLINEAR's intercept is the weight of a feature 1 too, and is penalised.
        svc = LinearSVC(loss="hinge", C=1 / (L2 * len(design)), tol=1e-6, max_iter=1_000_000, random_state=0)
        svc.fit(design[:, :-1], y)
        best = primal(design, targets[:, [column]], np.append(svc.coef_[0], svc.intercept_)[:, np.newaxis])[0]
        assert values[column] == pytest.approx(best, abs=tolerance + 1e-5)


def test_ranks_without_samples_do_no_harm(on_ranks, digits):
    design, targets = digits[0][:3], digits[1][:3, :3]

    def fitted(rank, total):
        own, place = slice(rank, rank + 1), {"rank": rank, "ranks": 5, "rows": 3}
        return fit_hinge(design[own], targets[own], total, **place, l2=L2, max_rounds=2000, tolerance=1e-4)

    found = on_ranks(5, fitted)
    assert found[4].state.shape == (0, 3)
    assert all(each.converged for each in found)


def test_a_start_from_another_penalty_takes_fewer_rounds(digits):
    cold, warm = alone(*digits), alone(*digits, start=alone(*digits, l2=0.2).state)
    assert warm.converged
    assert warm.exchanges < cold.exchanges
    assert warm.objective == pytest.approx(cold.objective, abs=10 * 1e-3)


def test_too_few_rounds_are_told_with_the_gap_that_is_left(digits):
    (design, targets), found = digits, alone(*digits, max_rounds=2, tolerance=1e-6)
    assert not found.converged
    gaps = primal(design, targets, found.weights) - dual(design, targets, found.state)
    assert gaps.max() == pytest.approx(found.residual, abs=1e-9)
