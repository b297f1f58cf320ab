"""Mixing of samples in pairs, against numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.augmentation import augmentation_seeds
from models.layers.mixup import mix_pairs, mixing_coefficients
from models.layers.preprocessing import InputGroup, preprocess
from models.losses import classification_loss

ROWS = np.arange(20_000)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.4, 1.0])
def test_coefficients_have_the_beta_distribution(alpha):
    drawn = mixing_coefficients(alpha, seed=3, epoch=1, rows=ROWS)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    expected = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    assert drawn.mean() == pytest.approx(0.5, abs=0.01)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)
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
def test_pairs_are_mixed_as_the_formula_says(dtype):
    random = np.random.default_rng(0)
    values = random.integers(0, 255, (6, 2, 3)).astype(dtype)
    coefficients = np.array([1.0, 0.0, 0.25, 0.5, 0.7, 0.1], np.float32)
    c = coefficients.reshape(-1, 1, 1)
    expected = c * values + (1 - c) * values[[1, 0, 3, 2, 5, 4]]
    mixed = mix_pairs(tf.constant(values), tf.constant(coefficients))
    assert mixed.dtype == dtype
    np.testing.assert_allclose(mixed, expected, rtol=1e-6, atol=0 if dtype.startswith("float") else 0.501)


def test_the_largest_pixel_stays_the_largest():
    values = np.full((2, 4), 65_535, np.uint16)
    for part in np.linspace(0, 1, 101, dtype=np.float32):
        np.testing.assert_array_equal(mix_pairs(tf.constant(values), tf.fill([2], part)), values)


def test_pairs_are_the_same_however_a_global_batch_is_divided():
    random = np.random.default_rng(0)
    values, coefficients = random.random((16, 3), np.float32), random.random(16, np.float32)
    whole = mix_pairs(tf.constant(values), tf.constant(coefficients))
    for size in (2, 4, 8):
        parts = [
            mix_pairs(tf.constant(values[start : start + size]), tf.constant(coefficients[start : start + size]))
            for start in range(0, 16, size)
        ]
        np.testing.assert_array_equal(tf.concat(parts, 0), whole)


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "bicubic"])
def test_mixed_pixels_are_mixed_network_inputs_up_to_half_a_stored_unit(upsampling):
    groups = [
        InputGroup("fine", (12, 12, 2), "uint16", (900.0, 1100.0), (500.0, 400.0)),
        InputGroup("coarse", (6, 6, 1), "uint16", (2000.0,), (250.0,)),
    ]
    inputs = {group.name: keras.Input(group.shape, dtype=group.dtype, name=group.name) for group in groups}
    network_input = keras.Model(inputs, preprocess(inputs, groups, upsampling=upsampling))
    random = np.random.default_rng(0)
    images = {group.name: random.integers(0, 4000, (8, *group.shape), dtype=np.uint16) for group in groups}
    coefficients = tf.constant(random.random(8, np.float32))
    stored = network_input({name: mix_pairs(tf.constant(each), coefficients) for name, each in images.items()})
    expected = mix_pairs(network_input({name: tf.constant(each) for name, each in images.items()}), coefficients)
    # Weights of bicubic interpolation, (-1/16, 9/16, 9/16, -1/16) at most per axis, add up to 1.25 without their signs.
    gain = 1.25**2 if upsampling == "bicubic" else 1.0
    difference = np.abs(stored - expected).max(axis=(0, 1, 2))
    assert (difference <= np.array([0.5 / 500, 0.5 / 400, gain * 0.5 / 250]) + 1e-5).all()
    assert difference.max() > 1e-4  # it is not nothing


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("task", ["multi_label", "single_label"])
def test_the_loss_of_mixed_targets_is_the_mixed_loss(task, label_smoothing):
    random = np.random.default_rng(0)
    targets = np.eye(4, dtype=np.float32)[[0, 2, 3, 3, 1, 0]]
    if task == "multi_label":
        targets = np.maximum(targets, np.eye(4, dtype=np.float32)[[1, 2, 0, 3, 1, 3]])
    coefficients, logits = random.random(6, np.float32), random.normal(0, 2, (6, 4)).astype(np.float32)
    loss = classification_loss(task, label_smoothing=label_smoothing)
    mixed = loss(mix_pairs(tf.constant(targets), tf.constant(coefficients)), tf.constant(logits))
    own, partners = (loss(tf.constant(each), tf.constant(logits)) for each in (targets, targets[[1, 0, 3, 2, 5, 4]]))
    np.testing.assert_allclose(mixed, coefficients * own + (1 - coefficients) * partners, rtol=1e-5)
