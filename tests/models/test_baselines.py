import numpy as np
import pytest

from models.metrics import constant_counts, f1_micro, frequent_classes, multi_label_counts


def test_counts_are_those_of_constant_predictions() -> None:
    targets, predicted = np.random.default_rng(0).integers(0, 2, (20, 4)), np.array([True, False, True, False])
    np.testing.assert_array_equal(
        constant_counts(predicted, targets.sum(axis=0), 20),
        multi_label_counts(np.tile(predicted.astype(float), (20, 1)), targets),
    )


def test_the_best_set_of_frequent_classes_by_hand() -> None:
    # 10 samples; counts 9, 6, 1. F1 of {0}: 18 / (10 + 16); of {0, 1}: 30 / (20 + 16); of all: 32 / (30 + 16).
    chosen = frequent_classes(np.array([9, 1, 6]), 10)
    assert chosen.tolist() == [True, False, True]
    assert f1_micro(constant_counts(chosen, np.array([9, 1, 6]), 10)) == pytest.approx(30 / 36)
