"""Batch norm over k ranks of b samples is batch norm over one rank of k * b, on a real ring."""

from typing import Any

import numpy as np
import pytest

from conf.load import load
from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(500)]

GLOBAL_BATCH, STEPS = 16, 3


def train(span: int, micro_batches: int, global_batch: int, steps: int) -> list[Any]:
    """Train a small network on fixed batches; how far its weights moved, and its moving statistics."""
    import keras
    import tensorflow as tf

    from models.layers.normalisation import FusedBatchNormalization, normalise_over
    from models.losses import classification_loss
    from pipelines.training.modes.synchronous import Synchronous
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.setup.recipe import make_exchange, make_optimizer
    from pipelines.training.step.accumulation import Accumulation
    from pipelines.training.step.loop import average_statistics
    from pipelines.training.step.step import make_accumulate, make_train_step

    collective = HorovodCollective(span)
    keras.utils.set_random_seed(0)
    config = load("smoke")
    # Every batch norm sees many values of each channel: of few, it would enlarge rounding errors a hundredfold.
    inputs = features = keras.Input((16, 16, 3), name="bands")
    for number, channels in enumerate((8, 16, 16)):
        features = keras.layers.Conv2D(channels, 3, use_bias=False, name=f"conv{number}")(features)
        features = keras.layers.ReLU()(FusedBatchNormalization(momentum=0.9, name=f"bn{number}")(features))
    logits = keras.layers.Dense(4, name="head")(keras.layers.GlobalAveragePooling2D()(features))
    model = keras.Model({"bands": inputs}, logits)
    if span > 1:
        normalise_over(model, collective.group)
    optimizer, exchange = make_optimizer(config.optimizer, model), make_exchange(config, collective)
    optimizer.learning_rate = 0.05
    loss = classification_loss("multi_label")
    sums = Accumulation(model, micro_batches) if micro_batches > 1 else None
    update = make_train_step(
        model, loss, optimizer, exchange, Synchronous(optimizer, exchange), jit_compile=False, accumulation=sums
    )
    accumulate = make_accumulate(model, loss, sums, jit_compile=False) if sums else None
    start = [np.array(variable) for variable in model.trainable_variables]
    random, part = np.random.default_rng(0), global_batch // (collective.size * micro_batches)
    for _ in range(steps):
        images = random.standard_normal((global_batch, 16, 16, 3)).astype(np.float32)
        # The mean of a rank's samples is not that of its group.
        images += np.arange(global_batch, dtype=np.float32).reshape(-1, 1, 1, 1) / 4
        targets = random.integers(0, 2, (global_batch, 4)).astype(np.float32)
        for number in range(micro_batches):
            first = (number * collective.size + collective.rank) * part
            mine = slice(first, first + part)
            function = update if number == micro_batches - 1 else accumulate
            function({"bands": tf.constant(images[mine])}, tf.constant(targets[mine]))
    average_statistics(model, collective)
    moved = [np.array(variable) - old for variable, old in zip(model.trainable_variables, start, strict=True)]
    return [*moved, *(np.array(variable) for variable in model.non_trainable_variables)]


def trained_on(ranks: int, *settings: int) -> list[np.ndarray]:
    """What a training on so many ranks gives, which is the same on every rank."""
    results: list[list[np.ndarray]] = on_ring(ranks, train, *settings, GLOBAL_BATCH, STEPS)
    np.testing.assert_equal(results[1:], [results[0]] * (ranks - 1))
    return results[0]


def assert_equal(trained: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for values, others in zip(trained, expected, strict=True):
        assert np.linalg.norm(others) > 0
        assert np.linalg.norm(values - others) <= 1e-3 * np.linalg.norm(others)


@pytest.mark.long
def test_two_ranks_of_8_are_one_of_16() -> None:
    # This process is the one rank, which needs no launcher for it.
    assert_equal(trained_on(2, 2, 1), train(1, 1, GLOBAL_BATCH, STEPS))


@pytest.mark.long
def test_groups_of_two_ranks_are_ranks_with_twice_the_batch() -> None:
    # 4 ranks in 2 groups, 2 micro-batches of 2 samples each: 4 batches of 4 samples, as one rank accumulates them.
    assert_equal(trained_on(4, 2, 2), train(1, 4, GLOBAL_BATCH, STEPS))


def test_groups_stay_whole_after_lost_workers() -> None:
    six = ["launch.num_workers=6", "training.batch_size_per_worker=4"]
    assert load("smoke", [*six, "model.batch_norm_ranks=2"]).smaller_sizes == [2]
    assert load("smoke", [*six, "model.batch_norm_ranks=all"]).smaller_sizes == [1, 2, 3]
