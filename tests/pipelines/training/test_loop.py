import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.schedules import gradual_warmup, multi_step
from pipelines.dataset.reader import Batch
from pipelines.training.loop import EpochResult, average_statistics, train_epoch
from pipelines.training.step import Step


class OneRank:
    rank, size = 0, 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values


class TwoRanks(OneRank):
    """The other rank's statistics are all 10."""

    size = 2

    def allreduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tensor + 10.0 for tensor in tensors]


def batches(count: int) -> Iterator[Batch]:
    for _ in range(count):
        yield Batch(
            {"a": np.zeros((4, 2, 2, 1), np.uint16)}, np.zeros((4, 3), np.uint8), np.ones(4, np.float32), np.arange(4)
        )


def one_epoch(count: int, step: Step, first_step: int, **settings: Any) -> EpochResult:
    """An epoch of so many batches on one rank, at a rate that stays where it is unless `settings` say otherwise."""
    chosen = {"optimizer": keras.optimizers.SGD(0.0), "schedule": multi_step(1.0, 100, []), "report": lambda _: None}
    return train_epoch(
        batches(count),
        step,
        collective=OneRank(),  # type: ignore[arg-type]
        first_step=first_step,
        **{**chosen, **settings},
    )


def test_rates_follow_the_schedule_and_losses_are_averaged() -> None:
    optimizer = keras.optimizers.SGD(0.0)
    seen = []

    def step(images: dict[str, tf.Tensor], targets: tf.Tensor, seeds: tf.Tensor | None) -> tf.Tensor:
        seen.append(float(optimizer.learning_rate))
        return tf.constant(float(len(seen)))

    schedule = gradual_warmup(multi_step(1.0, 100, []), 10)
    result = one_epoch(4, step, 5, optimizer=optimizer, schedule=schedule)
    assert seen == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert result.loss == 2.5
    assert result.images_per_second > 0
    assert 0 <= result.input_wait_fraction < 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_loss_that_is_not_finite_stops_with_rank_and_step(bad: float, at: int) -> None:
    calls = iter(range(4))

    def step(images: dict[str, tf.Tensor], targets: tf.Tensor, seeds: tf.Tensor | None) -> tf.Tensor:
        return tf.constant(bad if next(calls) == at else 1.0)

    with pytest.raises(FloatingPointError, match=rf"rank 0 at step {20 + at}"):
        one_epoch(4, step, 20)


def test_a_gradient_that_is_not_finite_is_told_alike() -> None:
    def step(images: dict[str, tf.Tensor], targets: tf.Tensor, seeds: tf.Tensor | None) -> tf.Tensor:
        raise tf.errors.InvalidArgumentError(None, None, "assertion failed: [rank 0: these gradients are not finite]")

    with pytest.raises(FloatingPointError, match=r"gradients are not finite on rank 0 at step 7: lower optimizer"):
        one_epoch(1, step, 7)


def test_statistics_are_averaged_over_the_ranks_and_weights_are_not(tiny_model: keras.Model) -> None:
    kernel = np.array(tiny_model.get_layer("conv").kernel)
    average_statistics(tiny_model, TwoRanks())  # type: ignore[arg-type]
    norm = tiny_model.get_layer("bn")
    np.testing.assert_allclose(norm.moving_mean, 5.0)  # (0 + 10) / 2
    np.testing.assert_allclose(norm.moving_variance, 5.5)  # (1 + 10) / 2
    np.testing.assert_array_equal(tiny_model.get_layer("conv").kernel, kernel)


def test_the_step_is_given_the_seeds_of_its_samples() -> None:
    given = []

    def step(images: dict[str, tf.Tensor], targets: tf.Tensor, seeds: tf.Tensor | None) -> tf.Tensor:
        assert seeds is not None
        given.append(seeds.numpy().tolist())
        return tf.constant(1.0)

    one_epoch(2, step, 0, seeds_of=lambda rows: (rows * 10).astype(np.int32))
    assert given == [[0, 10, 20, 30]] * 2


def test_checkpoints_come_at_multiples_and_go_on_counting() -> None:
    saved = []
    values = iter([1.0, 2.0, 3.0, 4.0])
    result = one_epoch(
        4,
        lambda images, targets, seeds: tf.constant(next(values)),
        5,
        earlier=(10.0, 5),
        checkpoint_every=3,
        checkpoint=lambda *place: saved.append(place),
    )
    # Steps 6 to 9: at 6 after the first, at 9 after the last.
    assert saved == [(6, 11.0, 6), (9, 20.0, 9)]
    assert result.loss == 20.0 / 9
