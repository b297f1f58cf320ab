"""`training.ema`: the average of weights and batch-norm statistics over the steps."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipelines.training.step.accumulation import moving_statistics
from pipelines.training.step.loop import average_statistics
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.weight_average import WeightAverage

DECAY = 0.75


def values(variables: Iterable[Any]) -> list[np.ndarray]:
    return [np.array(variable) for variable in variables]


def test_averages_are_those_of_numpy_and_for_weights_those_of_keras(
    make_training: Callable[..., Any], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    training = make_training(ema=DECAY)
    model, average, expected = training.model, training.average, []
    for number in range(5):
        training.step(images, targets, number)
        new = values([*model.trainable_variables, *moving_statistics(model)])
        decay = DECAY if number else 0.0
        expected = [decay * old + (1 - decay) * each for old, each in zip(expected or new, new, strict=True)]
    weights = len(model.trainable_variables)
    assert (len(average.variables), len(average.statistics)) == (weights + 2, 2)
    for variable, value in zip(average.variables, expected, strict=True):
        np.testing.assert_allclose(np.array(variable), value, rtol=1e-5, atol=1e-7)
    of_keras = [v for v in training.optimizer.variables if v.path.endswith("average")]
    np.testing.assert_equal(values(average.variables[:weights]), values(of_keras))


def test_the_model_has_the_averages_within_the_block_only(
    make_training: Callable[..., Any], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    training = make_training(ema=DECAY)
    for number in range(3):
        training.step(images, targets, number)
    before, model, inputs = training.values, training.model, {"a": tf.constant(images["a"])}
    logits = model(inputs).numpy()
    with training.average.in_model():
        averaged = model(inputs).numpy()
    assert not np.allclose(averaged, logits, atol=1e-4)
    np.testing.assert_equal(training.values, before)
    # A model that was built with the averages gives the same.
    other = keras.models.clone_model(model)
    own = [*other.trainable_variables, *moving_statistics(other)]
    for variable, average in zip(own, training.average.variables, strict=True):
        variable.assign(average)
    np.testing.assert_equal(values([model(inputs), other(inputs)]), [logits, averaged])


def test_a_step_that_is_skipped_changes_and_averages_nothing(
    make_training: Callable[..., Any], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    scale = LossScale()
    training = make_training(ema=DECAY, scale=scale)
    for number in range(2):
        training.step(images, targets, number)
    kept = [*training.model.trainable_variables, *training.optimizer.variables, *training.average.variables]
    before = values(kept)
    scale.scale.assign(np.float32(2.0**127))
    assert np.isfinite(training.step(images, targets * 1e4))
    assert float(scale.scale) == 2.0**126
    np.testing.assert_equal(values(kept), before)


def test_the_mean_of_statistics_and_of_their_averages_is_taken_over_the_ranks(tiny_model: keras.Model) -> None:
    average, norm = WeightAverage(tiny_model, DECAY), tiny_model.get_layer("bn")
    kernel = np.array(tiny_model.get_layer("conv").kernel)
    # The other rank's statistics, and their averages, are all 10.
    ranks: Any = SimpleNamespace(size=2, allreduce=lambda tensors: [tensor + 10.0 for tensor in tensors])
    average_statistics(tiny_model, ranks, average.statistics)
    for mean, variance in (average.statistics, (norm.moving_mean, norm.moving_variance)):
        np.testing.assert_allclose(mean, 5.0)  # (0 + 10) / 2
        np.testing.assert_allclose(variance, 5.5)  # (1 + 10) / 2
    for weights in (average.variables[0], tiny_model.get_layer("conv").kernel):
        np.testing.assert_array_equal(weights, kernel)
