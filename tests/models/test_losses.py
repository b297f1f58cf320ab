"""Losses against hand values."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.special import softmax

from models.losses import classification_loss


@pytest.mark.parametrize(
    ("task", "odds", "targets", "expected"),
    [
        # sigmoid(0) = 1/2, sigmoid(log 3) = 3/4
        (
            "multi_label",
            [[1.0, 3.0], [3.0, 1.0]],
            [[1, 1], [0, 1]],
            [(math.log(2) + math.log(4 / 3)) / 2, (math.log(4) + math.log(2)) / 2],
        ),
        # softmax: 1/8, 2/8, 5/8 and 1/4, 1/4, 2/4
        ("single_label", [[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]], [[0, 0, 1], [1, 0, 0]], [math.log(8 / 5), math.log(4)]),
    ],
)
def test_cross_entropy_of_each_sample_by_hand(task, odds, targets, expected):
    np.testing.assert_allclose(
        classification_loss(task)(np.array(targets, np.uint8), np.log(np.float32(odds))), expected, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("task", "targets", "reference"),
    [
        ("multi_label", [[1, 0, 1], [0, 0, 0]], keras.losses.BinaryCrossentropy),
        ("single_label", [[0, 0, 1], [1, 0, 0]], keras.losses.CategoricalCrossentropy),
    ],
)
def test_smoothed_labels_are_those_of_keras(
    task: str, targets: list[list[int]], reference: Callable[..., keras.losses.Loss]
) -> None:
    logits = np.array([[0.5, -1.0, 2.0], [1.5, 0.0, -0.25]], np.float32)
    loss = classification_loss(task, label_smoothing=0.1)
    expected = reference(from_logits=True, label_smoothing=0.1, reduction=None)(np.float32(targets), logits)
    for call in (loss, tf.function(loss, jit_compile=True)):
        np.testing.assert_allclose(call(tf.constant(targets, tf.uint8), logits), expected, rtol=1e-6)


@pytest.mark.parametrize("task", ["multi_label", "single_label"])
def test_large_logits_stay_finite_with_finite_gradients(task):
    logits, targets = tf.constant([[1e4, -1e4], [-1e4, 1e4]]), tf.constant([[1.0, 0.0], [1.0, 0.0]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        losses = classification_loss(task)(targets, logits)
    wrong = 1e4 if task == "multi_label" else 2e4  # each class is off by its logit, or the true one by the difference
    np.testing.assert_allclose(losses, [0.0, wrong])
    assert np.all(np.isfinite(tape.gradient(losses, logits)))


@pytest.mark.parametrize("task", ["multi_label", "single_label"])
def test_half_logits_are_summed_in_float32_and_compile(task):
    logits = tf.constant([[1.0, -2.0], [0.5, 0.25]], tf.float16)
    targets, loss = tf.constant([[1, 0], [0, 1]], tf.uint8), classification_loss(task)
    compiled = tf.function(loss, jit_compile=True)(targets, logits)
    assert compiled.dtype == tf.float32
    np.testing.assert_allclose(compiled, loss(targets, tf.cast(logits, tf.float32)), rtol=1e-6)


@pytest.mark.parametrize(
    ("task", "label_smoothing"), [("multi_label", 0.0), ("multi_label", 0.2), ("single_label", 0.0)]
)
def test_weights_of_classes_are_those_of_the_formula(task: str, label_smoothing: float) -> None:
    random, weights = np.random.default_rng(0), [0.5, 1.0, 4.0]
    logits = random.normal(0, 3, (6, 3))
    if task == "multi_label":
        targets = random.integers(0, 2, (6, 3)).astype(np.float64)
        t, p = (1 - label_smoothing) * targets + label_smoothing / 2, 1 / (1 + np.exp(-logits))
        expected = -(weights * t * np.log(p) + (1 - t) * np.log(1 - p)).mean(axis=1)
    else:
        targets = random.dirichlet(np.ones(3), 6)  # as of mixed samples
        expected = -(weights * targets * np.log(softmax(logits, axis=1))).sum(axis=1)
    loss = classification_loss(task, label_smoothing=label_smoothing, class_weights=weights)
    np.testing.assert_allclose(loss(tf.constant(targets), tf.constant(logits)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("multilabel", {}, r"one of \['multi_label', 'single_label'\], got 'multilabel'"),
        *(("single_label", {"label_smoothing": part}, r"must be in \[0, 1\)") for part in (-0.1, 1.0, float("nan"))),
        *(
            (task, {"class_weights": [1.0, 0.0]}, r"class_weights must be positive, got \[1\.0, 0\.0\]")
            for task in ("multi_label", "single_label")
        ),
    ],
)
def test_what_makes_no_loss_is_rejected(task: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classification_loss(task, **settings)
