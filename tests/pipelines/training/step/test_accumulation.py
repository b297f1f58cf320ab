"""Several micro-batches per optimizer step, on one rank."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from models.losses import classification_loss
from pipelines.training.step.accumulation import moving_statistics

LOSS = classification_loss("multi_label")


def test_a_step_is_the_mean_of_what_its_micro_batches_give_alone(
    make_training: Callable[..., Any], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    training = make_training(micro_batches=2)
    gradients, losses, statistics = [], [], []
    for half in (slice(0, 4), slice(4, 8)):
        alone = make_training().model
        with tf.GradientTape() as tape:
            logits = alone({"a": tf.constant(images["a"][half])}, training=True)
            loss = tf.reduce_mean(LOSS(tf.constant(targets[half]), logits))
        gradients.append(tape.gradient(loss, [variable.value for variable in alone.trainable_variables]))
        losses.append(float(loss))
        statistics.append([np.array(variable) for variable in moving_statistics(alone)])
    start = [np.array(variable) for variable in training.model.trainable_variables]

    assert training.step(images, targets) == pytest.approx(np.mean(losses), rel=1e-6)
    for variable, before, first, second in zip(training.model.trainable_variables, start, *gradients, strict=True):
        np.testing.assert_allclose(np.array(variable), before - 0.1 * (first + second).numpy() / 2, atol=1e-7)
    for variable, *both in zip(moving_statistics(training.model), *statistics, strict=True):
        assert not np.array_equal(*both)
        np.testing.assert_allclose(np.array(variable), np.mean(both, axis=0), rtol=1e-6)
