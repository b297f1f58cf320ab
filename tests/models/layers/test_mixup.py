"""Mixing of samples in pairs, against numpy."""

import numpy as np
import pytest
import tensorflow as tf

from models.layers.augmentation import augmentation_seeds, mix_pairs, mixing_coefficients
from models.losses import classification_loss

ROWS = np.arange(20_000)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.4, 1.0])
def test_coefficients_have_the_beta_distribution(alpha):
    drawn = mixing_coefficients(alpha, seed=3, epoch=1, rows=ROWS)
    assert drawn.dtype == np.float32
    assert 0 <= drawn.min() <= drawn.max() <= 1
    expected = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    assert (drawn.mean(), drawn.var()) == (
        pytest.approx(0.5, abs=0.01),
        pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03),
    )
    # Compared as parts, because most values of a small alpha are 0 or 1 to many digits.
    for limit in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        assert (drawn <= limit).mean() == pytest.approx((expected <= limit).mean(), abs=0.015)


def test_coefficients_are_a_function_of_seed_epoch_and_row_alone():
    drawn = mixing_coefficients(0.3, seed=3, epoch=1, rows=ROWS[:64])
    shuffled = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(mixing_coefficients(0.3, seed=3, epoch=1, rows=shuffled), drawn[shuffled])
    for other in ({"seed": 4, "epoch": 1}, {"seed": 3, "epoch": 2}):
        assert np.abs(mixing_coefficients(0.3, **other, rows=ROWS[:64]) - drawn).mean() > 0.1
    seeds = augmentation_seeds(3, 1, ROWS).astype(np.float64)
    assert abs(np.corrcoef(seeds, mixing_coefficients(1.0, seed=3, epoch=1, rows=ROWS))[0, 1]) < 0.03


@pytest.mark.parametrize("alpha", [0.0, 1.5, -0.1])
def test_an_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\], got"):
        mixing_coefficients(alpha, seed=0, epoch=0, rows=[0])


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint16", "uint8"])
def test_pairs_are_mixed_as_the_formula_says_and_the_largest_pixel_stays(dtype):
    values = np.random.default_rng(0).integers(0, 255, (6, 2, 3)).astype(dtype)
    c = np.array([1.0, 0.0, 0.25, 0.5, 0.7, 0.1], np.float32)
    expected = (c * values.T + (1 - c) * values[[1, 0, 3, 2, 5, 4]].T).T
    mixed = mix_pairs(tf.constant(values), tf.constant(c))
    assert mixed.dtype == dtype
    np.testing.assert_allclose(mixed, expected, rtol=1e-6, atol=0 if dtype.startswith("float") else 0.501)
    largest = np.full((202, 4), 65_535 if dtype == "uint16" else 255, dtype)
    parts = np.linspace(0, 1, 101, dtype=np.float32).repeat(2)
    np.testing.assert_allclose(mix_pairs(tf.constant(largest), tf.constant(parts)), largest, rtol=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("task", ["multi_label", "single_label"])
def test_the_loss_of_mixed_targets_is_the_mixed_loss(task, label_smoothing):
    random, targets = np.random.default_rng(0), np.eye(4, dtype=np.float32)[[0, 2, 3, 3, 1, 0]]
    if task == "multi_label":
        targets = np.maximum(targets, np.eye(4, dtype=np.float32)[[1, 2, 0, 3, 1, 3]])
    coefficients, logits = random.random(6, np.float32), random.normal(0, 2, (6, 4)).astype(np.float32)
    loss = classification_loss(task, label_smoothing=label_smoothing)
    mixed = loss(mix_pairs(tf.constant(targets), tf.constant(coefficients)), tf.constant(logits))
    own, partners = (loss(tf.constant(each), tf.constant(logits)) for each in (targets, targets[[1, 0, 3, 2, 5, 4]]))
    np.testing.assert_allclose(mixed, coefficients * own + (1 - coefficients) * partners, rtol=1e-5)
