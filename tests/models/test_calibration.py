import numpy as np
import pytest
from sklearn.metrics import f1_score

from models.calibration import best_thresholds, multi_label_reliability, single_label_reliability


def test_the_error_is_the_mean_gap_weighted_by_decisions() -> None:
    # Bins of a half: two decisions of 0.2 and 0.4, of which one is right, and two of 0.6 and 1.0, both right.
    probabilities, targets = np.array([[0.2, 0.4], [0.6, 1.0]]), np.array([[1, 0], [1, 1]])
    found = multi_label_reliability(probabilities, targets, bins=2)
    assert (found.counts.tolist(), found.accuracy.tolist()) == ([2, 2], [0.5, 1.0])
    assert found.confidence.tolist() == pytest.approx([0.3, 0.8])
    assert found.expected_error == pytest.approx((2 * 0.2 + 2 * 0.2) / 4)


def test_an_empty_bin_counts_nothing_and_one_label_counts_the_likeliest() -> None:
    probabilities, targets = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), np.array([[1, 0], [0, 1], [0, 1]])
    found = single_label_reliability(probabilities, targets, bins=2)
    assert found.counts.tolist() == [0, 3]
    assert np.isnan(found.accuracy[0])
    assert found.expected_error == pytest.approx(0.8 - 2 / 3)


def test_no_threshold_has_a_larger_f1() -> None:
    random = np.random.default_rng(1)
    probabilities = np.round(random.random((60, 4)), 1)  # with equal ones
    targets = (random.random((60, 4)) < probabilities * [0.2, 0.5, 1.0, 0.0]).astype(np.uint8)
    found = best_thresholds(probabilities, targets, 0.5)
    assert found[3] == 0.5, "a class without positives"
    for column in range(3):
        thresholds = [found[column], *np.linspace(0.01, 1, 100)]
        mine, *others = (f1_score(targets[:, column], probabilities[:, column] >= each) for each in thresholds)
        assert mine == pytest.approx(max(others))


def test_of_equal_thresholds_the_nearest_to_the_default_is_taken() -> None:
    probabilities, targets = np.array([[0.9], [0.1]]), np.array([[1], [0]])
    assert best_thresholds(probabilities, targets, 0.5).tolist() == [0.5]
