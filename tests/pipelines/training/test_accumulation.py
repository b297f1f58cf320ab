"""Several micro-batches per optimizer step, on one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import resolve
from models.losses import classification_loss
from pipelines.training.accumulation import Accumulation, moving_statistics
from pipelines.training.checkpoint import TrainingState
from pipelines.training.recipe import make_exchange
from pipelines.training.resume import Checkpoints
from pipelines.training.step import make_accumulate, make_train_step

LOSS = classification_loss("multi_label")


class Training:
    """A model that is trained on two micro-batches of four samples per step."""

    def __init__(self, model: keras.Model, folder: Path, one_rank: Any, codec: str = "none") -> None:
        self.model = model
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")
        self.optimizer.build(model.trainable_variables)
        self.exchange = make_exchange(resolve("smoke", [f"exchange.codec={codec}", "exchange.dense_below=0"]), one_rank)
        accumulation = Accumulation(model, 2)
        self.update = make_train_step(
            model, LOSS, self.optimizer, self.exchange, jit_compile=False, accumulation=accumulation
        )
        self.accumulate = make_accumulate(model, LOSS, accumulation, jit_compile=False)
        variables = [*model.variables, *self.optimizer.variables]
        initial = TrainingState(0, 0, 0, 8, "run", "data", [])
        self.checkpoints = Checkpoints(folder, initial, variables, self.exchange, one_rank)

    def step(self, images: dict[str, np.ndarray], targets: np.ndarray) -> float:
        parts = [{name: tf.constant(group[part]) for name, group in images.items()} for part in HALVES]
        self.accumulate(parts[0], tf.constant(targets[HALVES[0]]))
        return float(self.update(parts[1], tf.constant(targets[HALVES[1]])))

    @property
    def values(self) -> list[np.ndarray]:
        return [np.array(variable) for variable in [*self.model.variables, *self.optimizer.variables]]


HALVES = (slice(0, 4), slice(4, 8))


@pytest.fixture
def make_training(tiny_model: keras.Model, tmp_path: Path, one_rank: Any) -> Callable[..., Training]:
    def make(**settings: Any) -> Training:
        model = keras.models.clone_model(tiny_model)
        model.set_weights(tiny_model.get_weights())
        return Training(model, tmp_path, one_rank, **settings)

    return make


def test_a_step_is_the_mean_of_what_its_micro_batches_give_alone(
    make_training: Callable[..., Training], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    training = make_training()
    gradients, losses, statistics = [], [], []
    for half in HALVES:
        alone = make_training().model
        with tf.GradientTape() as tape:
            logits = alone({"a": tf.constant(images["a"][half])}, training=True)
            loss = tf.reduce_mean(LOSS(tf.constant(targets[half]), logits))
        gradients.append(tape.gradient(loss, [variable.value for variable in alone.trainable_variables]))
        losses.append(float(loss))
        statistics.append([np.array(variable) for variable in moving_statistics(alone)])
    start = [np.array(variable) for variable in training.model.trainable_variables]

    assert training.step(images, targets) == pytest.approx(np.mean(losses), rel=1e-6)
    expected = [weight - 0.1 * (a + b).numpy() / 2 for weight, a, b in zip(start, *gradients, strict=True)]
    for variable, value in zip(training.model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(np.array(variable), value, atol=1e-7)
    for variable, *both in zip(moving_statistics(training.model), *statistics, strict=True):
        assert not np.array_equal(*both)
        np.testing.assert_allclose(np.array(variable), np.mean(both, axis=0), rtol=1e-6)


def test_every_step_begins_with_nothing(
    make_training: Callable[..., Training], images: dict[str, np.ndarray], targets: np.ndarray
) -> None:
    training = make_training()
    training.optimizer.learning_rate = 0.0
    first = training.step(images, targets)
    assert training.step(images, targets) == first


@pytest.mark.parametrize("codec", ["none", "{name: qsgd, bits: 4}", "onebit"])
def test_a_repeated_and_a_resumed_training_have_equal_bits(
    make_training: Callable[..., Training], images: dict[str, np.ndarray], targets: np.ndarray, codec: str
) -> None:
    whole, again = make_training(codec=codec), make_training(codec=codec)
    for step in range(4):
        assert whole.step(images, targets) == again.step(images, targets)
        if step == 1:
            again.checkpoints.save(epochs_done=0, step=2, history=[], loss_sum=1.0, loss_count=2)
    resumed = make_training(codec=codec)
    assert resumed.checkpoints.restore(resumes=True).step == 2
    for _ in range(2):
        resumed.step(images, targets)
    for expected, repeated, continued in zip(whole.values, again.values, resumed.values, strict=True):
        np.testing.assert_array_equal(repeated, expected)
        np.testing.assert_array_equal(continued, expected)
