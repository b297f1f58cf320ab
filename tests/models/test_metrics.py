"""Metrics by hand, and those of predictions that use no image."""

import math

import numpy as np
import pytest

from models import metrics

# Predictions at 0.5: 1 0 1 / 1 1 0 / 0 0 0 / 1 0 1
PROBABILITIES = np.array([[0.9, 0.2, 0.6], [0.8, 0.7, 0.1], [0.4, 0.3, 0.2], [0.5, 0.1, 0.9]])
TARGETS = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]])
COUNTS = np.array([[2, 1, 0], [1, 0, 2], [1, 1, 0]])


def test_counts_by_hand():
    counts = metrics.multi_label_counts(PROBABILITIES, TARGETS)
    assert counts.dtype == np.int64
    np.testing.assert_array_equal(counts, COUNTS)
    np.testing.assert_array_equal(metrics.multi_label_counts(PROBABILITIES, TARGETS, 0.75)[0], [2, 0, 0])
    np.testing.assert_array_equal(metrics.multi_label_counts(np.zeros((0, 2)), np.zeros((0, 2))), np.zeros((3, 2)))


def test_single_label_counts_predict_the_likeliest_class_only():
    probabilities, targets = np.array([[0.4, 0.35, 0.25], [0.3, 0.3, 0.4], [0.2, 0.4, 0.4]]), np.eye(3)[[0, 1, 1]]
    # Predicted 0, 2 and (of two equals) 1.
    np.testing.assert_array_equal(
        metrics.single_label_counts(probabilities, targets), [[1, 1, 0], [0, 0, 1], [0, 1, 0]]
    )


def test_f1_by_hand_with_zero_for_a_class_that_never_occurs():
    # Per class 2 TP / (2 TP + FP + FN): 4/6, 2/3, 0/2; together TP 3, FP 3, FN 2: 6/11.
    np.testing.assert_allclose(metrics.f1_per_class(COUNTS), [2 / 3, 2 / 3, 0])
    assert (metrics.f1_micro(COUNTS), metrics.f1_macro(COUNTS)) == pytest.approx((6 / 11, 4 / 9))
    nothing = np.zeros((3, 1), np.int64)
    assert (metrics.f1_per_class(nothing).tolist(), metrics.f1_micro(nothing)) == ([0.0], 0.0)


def test_average_precision_by_hand_and_undefined_without_positives():
    # Class 1 by falling probability: 0.7 (yes), 0.3 (yes), 0.2, 0.1: precision 1 at both recalls.
    # Class 0: 0.9 (yes), 0.8 (yes), 0.5 (no), 0.4 (yes): (1 + 1 + 3/4) / 3.
    per_class = metrics.average_precision_per_class(PROBABILITIES, TARGETS)
    np.testing.assert_allclose(per_class, [(1 + 1 + 3 / 4) / 3, 1.0, np.nan])
    assert metrics.mean_average_precision(per_class) == pytest.approx((11 / 12 + 1) / 2)
    assert math.isnan(metrics.mean_average_precision(np.array([np.nan, np.nan])))


def test_top_k_counts_samples_and_settles_ties_by_the_order_of_classes():
    probabilities = np.array([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.4, 0.4, 0.2], [0.1, 0.2, 0.7]])
    targets = np.eye(3)[[0, 0, 1, 1]]
    assert [metrics.top_k_correct(probabilities, targets, k) for k in (1, 2, 3)] == [2, 4, 4]


def test_table_has_a_row_a_class():
    rows = metrics.per_class_table(["urban", "water", "ice"], COUNTS, np.array([0.5, 0.25, np.nan]))
    columns = ("class", "support", "precision", "recall", "f1", "average_precision")
    expected = [
        ("urban", 3, pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(2 / 3), 0.5),
        ("water", 2, 1.0, 0.5, pytest.approx(2 / 3), 0.25),
        ("ice", 0, 0.0, 0.0, 0.0, pytest.approx(np.nan, nan_ok=True)),
    ]
    assert rows == [dict(zip(columns, row, strict=True)) for row in expected]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (metrics.multi_label_counts, (PROBABILITIES, TARGETS[:, :2]), r"got \(4, 3\) and \(4, 2\)"),
        (metrics.single_label_counts, (PROBABILITIES, TARGETS[:, :2]), r"got \(4, 3\) and \(4, 2\)"),
        (metrics.average_precision_per_class, (PROBABILITIES, TARGETS[:, :2]), r"got \(4, 3\) and \(4, 2\)"),
        (metrics.multi_label_counts, (PROBABILITIES[0], TARGETS[0]), r"must both be \(samples, classes\)"),
        (metrics.top_k_correct, (PROBABILITIES, TARGETS, 4), r"k must be in 1..3 \(classes\), got 4"),
        (metrics.per_class_table, (["a", "b"], COUNTS, np.zeros(3)), "got 2, 3 and 3"),
    ],
)
def test_shapes_that_differ_are_rejected(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_counts_are_those_of_constant_predictions():
    targets, predicted = np.random.default_rng(0).integers(0, 2, (20, 4)), np.array([True, False, True, False])
    np.testing.assert_array_equal(
        metrics.constant_counts(predicted, targets.sum(axis=0), 20),
        metrics.multi_label_counts(np.tile(predicted.astype(float), (20, 1)), targets),
    )


def test_the_best_set_of_frequent_classes_by_hand():
    # 10 samples; counts 9, 6, 1. F1 of {0}: 18 / (10 + 16); of {0, 1}: 30 / (20 + 16); of all: 32 / (30 + 16).
    chosen = metrics.frequent_classes(np.array([9, 1, 6]), 10)
    assert chosen.tolist() == [True, False, True]
    assert metrics.f1_micro(metrics.constant_counts(chosen, np.array([9, 1, 6]), 10)) == pytest.approx(30 / 36)
