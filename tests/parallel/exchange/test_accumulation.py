"""k micro-batches on each of N ranks are one batch on each of kN ranks."""

from typing import Any

import numpy as np
import pytest

from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(400)]

MICRO_BATCH, PARTS, STEPS = 8, 4, 4


def train(micro_batches: int, micro_batch: int, parts: int, steps: int) -> list[Any]:
    """Train a small network on a fixed order of samples; its weights and moving statistics at the end."""
    import keras
    import tensorflow as tf

    from conf.load import load
    from models.layers.normalisation import FusedBatchNormalization
    from models.losses import classification_loss
    from pipelines.dataset.format.order import rank_parts
    from pipelines.training.modes.synchronous import Synchronous
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.setup.recipe import make_exchange, make_optimizer
    from pipelines.training.step.accumulation import Accumulation
    from pipelines.training.step.loop import average_statistics
    from pipelines.training.step.step import make_accumulate, make_train_step

    collective = HorovodCollective()
    keras.utils.set_random_seed(0)
    config = load("smoke")
    inputs = features = keras.Input((16, 16, 3), name="bands")
    for number, channels in enumerate((8, 16)):
        features = keras.layers.Conv2D(channels, 3, strides=2, use_bias=False, name=f"conv{number}")(features)
        features = keras.layers.ReLU()(FusedBatchNormalization(momentum=0.9, name=f"bn{number}")(features))
    logits = keras.layers.Dense(4, name="head")(keras.layers.GlobalAveragePooling2D()(features))
    model = keras.Model({"bands": inputs}, logits)
    optimizer, exchange = make_optimizer(config.optimizer, model), make_exchange(config, collective)
    optimizer.learning_rate = 0.05
    loss, sums = classification_loss("multi_label"), Accumulation(model, micro_batches)
    update = make_train_step(
        model, loss, optimizer, exchange, Synchronous(optimizer, exchange), jit_compile=False, accumulation=sums
    )
    accumulate = make_accumulate(model, loss, sums, jit_compile=False)

    random = np.random.default_rng(0)
    images = random.standard_normal((steps * parts * micro_batch, 16, 16, 3)).astype(np.float32)
    targets, order = random.integers(0, 2, (len(images), 4)).astype(np.float32), random.permutation(len(images))
    rows = rank_parts(
        order,
        global_batch_size=parts * micro_batch,
        rank=collective.rank,
        size=collective.size,
        start_step=0,
        micro_batches=micro_batches,
    )
    for number, mine in enumerate(rows, start=1):
        function = accumulate if number % micro_batches else update
        function({"bands": tf.constant(images[mine])}, tf.constant(targets[mine]))
    average_statistics(model, collective)
    return [np.array(variable) for variable in model.variables]


def train_each(trainings: int, *settings: int) -> list[list[Any]]:
    """What some trainings give, one after the other."""
    return [train(*settings) for _ in range(trainings)]


def trained_on(ranks: int, micro_batches: int, trainings: int = 1) -> list[list[np.ndarray]]:
    """The weights at the end of each training, which are the same on every rank."""
    first, *others = on_ring(ranks, train_each, trainings, micro_batches, MICRO_BATCH, PARTS, STEPS)
    np.testing.assert_equal(others, [first] * len(others))
    return list(first)


@pytest.fixture(scope="module")
def alone() -> list[np.ndarray]:
    """The weights after the same steps on one rank: this process, which needs no launcher for it."""
    return train(PARTS, MICRO_BATCH, PARTS, STEPS)


@pytest.mark.long
def test_ranks_and_micro_batches_can_be_traded_for_each_other(alone: list[np.ndarray]) -> None:
    both, again = trained_on(2, 2, trainings=2)
    np.testing.assert_equal(both, again)
    for weights, expected in zip(both, alone, strict=True):
        np.testing.assert_allclose(weights, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.long
def test_four_ranks_without_micro_batches_are_one_with_four(alone: list[np.ndarray]) -> None:
    (weights,) = trained_on(4, 1)
    for own, expected in zip(weights, alone, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-6, rtol=1e-6)
