"""`training.ema`: the average of weights and batch-norm statistics over the steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from models.losses import classification_loss
from pipelines.training.accumulation import moving_statistics
from pipelines.training.checkpoint import TrainingState
from pipelines.training.loop import average_statistics
from pipelines.training.loss_scale import LossScale
from pipelines.training.recipe import make_exchange
from pipelines.training.resume import Checkpoints
from pipelines.training.step import make_train_step
from pipelines.training.weight_average import WeightAverage

DECAY = 0.75
LOSS = classification_loss("multi_label")


class Training:
    """A copy of a model that is trained with an average of its weights."""

    def __init__(self, original: keras.Model, folder: Path, one_rank: Any, scale: LossScale | None = None) -> None:
        self.model = keras.models.clone_model(original)
        self.model.set_weights(original.get_weights())
        # Keras averages the trainable variables too: this is what ours must equal.
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=DECAY, name="sgd")
        self.optimizer.build(self.model.trainable_variables)
        self.average = WeightAverage(self.model, DECAY)
        exchange = make_exchange(load("smoke"), one_rank)
        self.train = make_train_step(
            self.model,
            LOSS,
            self.optimizer,
            exchange,
            jit_compile=False,
            average=self.average,
            loss_scale=scale,
        )
        self.variables = [*self.model.variables, *self.optimizer.variables, *self.average.variables]
        initial = TrainingState(0, 0, 0, 8, "run", "data", [])
        self.checkpoints = Checkpoints(folder, initial, self.variables, exchange, one_rank)

    def step(self, images: dict[str, np.ndarray], targets: np.ndarray, number: int) -> list[np.ndarray]:
        """Take a step; what is averaged, after it."""
        rolled = {name: tf.constant(np.roll(group, number, axis=1)) for name, group in images.items()}
        self.train(rolled, tf.constant(targets))
        return [np.array(v) for v in [*self.model.trainable_variables, *moving_statistics(self.model)]]


@pytest.fixture
def make_training(tiny_model: keras.Model, tmp_path: Path, one_rank: Any) -> Callable[..., Training]:
    return lambda **settings: Training(tiny_model, tmp_path, one_rank, **settings)


def test_averages_are_those_of_numpy_and_for_weights_those_of_keras(
    make_training: Callable[..., Training], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    training = make_training()
    expected: list[np.ndarray] = []
    for number in range(5):
        values = training.step(images, targets, number)
        decay = DECAY if number else 0.0
        expected = [decay * old + (1 - decay) * new for old, new in zip(expected or values, values, strict=True)]
    assert len(expected) == len(training.average.variables) == 5 + 2
    assert len(training.average.statistics) == 2
    for variable, value in zip(training.average.variables, expected, strict=True):
        np.testing.assert_allclose(np.array(variable), value, rtol=1e-5, atol=1e-7)
    of_keras = [v for v in training.optimizer.variables if v.path.endswith("average")]
    assert len(of_keras) == len(training.model.trainable_variables)
    for own, other in zip(training.average.variables, of_keras, strict=False):
        np.testing.assert_array_equal(np.array(own), np.array(other))


def test_the_model_has_the_averages_within_the_block_only(
    make_training: Callable[..., Training], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    training = make_training()
    for number in range(3):
        training.step(images, targets, number)
    inputs = {name: tf.constant(group) for name, group in images.items()}
    before = [np.array(variable) for variable in training.variables]
    logits = training.model(inputs).numpy()
    with training.average.in_model():
        averaged = training.model(inputs).numpy()
    assert not np.allclose(averaged, logits, atol=1e-4)
    for variable, value in zip(training.variables, before, strict=True):
        np.testing.assert_array_equal(np.array(variable), value)
    np.testing.assert_array_equal(training.model(inputs), logits)
    # A model that was built with the averages gives the same.
    other = keras.models.clone_model(training.model)
    for variable, average in zip(
        [*other.trainable_variables, *moving_statistics(other)], training.average.variables, strict=True
    ):
        variable.assign(average)
    np.testing.assert_array_equal(other(inputs), averaged)


def test_a_resumed_average_has_equal_bits(
    make_training: Callable[..., Training], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    whole = make_training()
    for number in range(4):
        whole.step(images, targets, number)
        if number == 1:
            whole.checkpoints.save(epochs_done=0, step=2, history=[], loss_sum=1.0, loss_count=2)
    resumed = make_training()
    assert resumed.checkpoints.restore(resumes=True).step == 2
    for number in (2, 3):
        resumed.step(images, targets, number)
    for own, expected in zip(resumed.variables, whole.variables, strict=True):
        np.testing.assert_array_equal(np.array(own), np.array(expected))


def test_a_step_that_is_skipped_averages_nothing(
    make_training: Callable[..., Training], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    scale = LossScale()
    training = make_training(scale=scale)
    for number in range(2):
        training.step(images, targets, number)
    before = [np.array(variable) for variable in training.average.variables]
    scale.scale.assign(np.float32(2.0**127))
    training.train({name: tf.constant(group) for name, group in images.items()}, tf.constant(targets) * 1e4)
    assert float(scale.scale) == 2.0**126
    for variable, value in zip(training.average.variables, before, strict=True):
        np.testing.assert_array_equal(np.array(variable), value)


class TwoRanks:
    """The other rank's statistics, and their averages, are all 10."""

    rank, size = 0, 2

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        return [tensor + 10.0 for tensor in tensors]


def test_the_mean_of_averaged_statistics_is_taken_over_the_ranks(tiny_model: keras.Model) -> None:
    average = WeightAverage(tiny_model, DECAY)
    average_statistics(tiny_model, TwoRanks(), average.statistics)
    mean, variance = average.statistics
    np.testing.assert_allclose(mean, 5.0)  # (0 + 10) / 2
    np.testing.assert_allclose(variance, 5.5)  # (1 + 10) / 2
    np.testing.assert_array_equal(average.variables[0], tiny_model.get_layer("conv").kernel)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_a_decay_that_averages_nothing_is_refused(tiny_model: keras.Model, decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\), got"):
        WeightAverage(tiny_model, decay)
