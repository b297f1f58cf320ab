"""k micro-batches on each of N ranks are one batch on each of kN ranks; so is batch norm over groups of ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conf.load import load
from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(500)]

# Channels and stride of the convolutions, samples of a step, steps, and how much brighter each sample of a step is.
ALIKE = ((8, 16), 2, 32, 4, 0.0)
# Every batch norm sees many values of each channel: of few, it would enlarge rounding errors a hundredfold. The mean of
# a rank's samples is not that of its group.
BRIGHTER = ((8, 16, 16), 1, 16, 3, 0.25)


def train(
    span: int, micro_batches: int, channels: tuple[int, ...], stride: int, batch: int, steps: int, brighter: float
) -> list[Any]:
    """Train a small network on a fixed order of samples; how far its weights moved, and its moving statistics.

    Each batch norm is over `span` ranks.
    """
    import keras
    import tensorflow as tf

    from models.layers.normalisation import FusedBatchNormalization, normalise_over
    from models.losses import classification_loss
    from pipelines.dataset.format.order import rank_parts
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.setup.recipe import make_mode

    collective = HorovodCollective(span)
    keras.utils.set_random_seed(0)
    inputs = features = keras.Input((16, 16, 3), name="bands")
    for number, width in enumerate(channels):
        features = keras.layers.Conv2D(width, 3, strides=stride, use_bias=False, name=f"conv{number}")(features)
        features = keras.layers.ReLU()(FusedBatchNormalization(momentum=0.9, name=f"bn{number}")(features))
    logits = keras.layers.Dense(4, name="head")(keras.layers.GlobalAveragePooling2D()(features))
    model = keras.Model({"bands": inputs}, logits)
    if span > 1:
        normalise_over(model, collective.group)
    loss = classification_loss("multi_label")
    mode = make_mode(load("smoke"), model, loss, collective, steps_per_epoch=steps, micro_batches=micro_batches)
    mode.optimizer.learning_rate = 0.05
    start = [np.array(variable) for variable in model.trainable_variables]
    random = np.random.default_rng(0)
    images = random.standard_normal((steps * batch, 16, 16, 3)).astype(np.float32)
    targets, order = random.integers(0, 2, (len(images), 4)).astype(np.float32), random.permutation(len(images))
    images[order] += brighter * (np.arange(len(images), dtype=np.float32) % batch).reshape(-1, 1, 1, 1)
    group, member = divmod(collective.rank, span)
    rows = rank_parts(
        order,
        global_batch_size=batch,
        rank=group,
        size=collective.size // span,
        start_step=0,
        micro_batches=micro_batches,
    )
    for number, of_group in enumerate(rows, start=1):
        mine = np.array_split(of_group, span)[member]
        function: Any = mode.accumulate if number % micro_batches else mode.step
        function({"bands": tf.constant(images[mine])}, tf.constant(targets[mine]))
    mode.come_together()
    moved = [np.array(variable) - old for variable, old in zip(model.trainable_variables, start, strict=True)]
    return [*moved, *(np.array(variable) for variable in model.non_trainable_variables)]


def train_twice(*settings: Any) -> list[list[Any]]:
    """What two trainings give, one after the other."""
    return [train(*settings) for _ in range(2)]


def trained_on(ranks: int, *settings: Any, function: Callable[..., list[Any]] = train) -> list[Any]:
    """What a training on so many ranks gives, which is the same on every rank."""
    first, *others = on_ring(ranks, function, *settings)
    np.testing.assert_equal(others, [first] * len(others))
    return list(first)


@pytest.fixture(scope="module")
def alone() -> list[np.ndarray]:
    """The same steps on one rank: this process, which needs no launcher for it."""
    return train(1, 4, *ALIKE)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 1)])
def test_ranks_and_micro_batches_can_be_traded_for_each_other(
    alone: list[np.ndarray], ranks: int, micro_batches: int
) -> None:
    found, again = trained_on(ranks, 1, micro_batches, *ALIKE, function=train_twice)
    np.testing.assert_equal(found, again)
    for own, expected in zip(found, alone, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "alone_in"),
    [
        (2, 1, 1),
        # 4 ranks in 2 groups, 2 micro-batches of 2 samples each: 4 batches of 4 samples, as one rank accumulates them.
        (4, 2, 4),
    ],
)
def test_batch_norm_over_two_ranks_is_that_of_a_rank_with_twice_the_batch(
    ranks: int, micro_batches: int, alone_in: int
) -> None:
    for own, expected in zip(
        trained_on(ranks, 2, micro_batches, *BRIGHTER), train(1, alone_in, *BRIGHTER), strict=True
    ):
        assert np.linalg.norm(expected) > 0
        assert np.linalg.norm(own - expected) <= 1e-3 * np.linalg.norm(expected)


def test_groups_stay_whole_after_lost_workers() -> None:
    six = ["launch.num_workers=6", "training.batch_size_per_worker=4"]
    assert load("smoke", [*six, "model.batch_norm_ranks=2"]).smaller_sizes == [2]
    assert load("smoke", [*six, "model.batch_norm_ranks=all"]).smaller_sizes == [1, 2, 3]
