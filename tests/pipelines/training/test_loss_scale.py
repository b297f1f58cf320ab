from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE
from pipelines.training.loss_scale import LossScale, ranks_not_finite


class Ranks:
    """This rank, and another one of which a test says whether it overflows."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.other_overflows = tf.Variable(0.0)

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        return [tensor + self.other_overflows * tf.constant([0.0, 1.0]) for tensor in tensors]


def make_step(scale: LossScale, ranks: Ranks) -> tuple[tf.Variable, tf.Variable, Any]:
    weight, residual = tf.Variable(1.0), tf.Variable(0.0)

    @tf.function
    def step(gradient: tf.Tensor) -> None:
        def update() -> None:
            residual.assign_add(1.0)
            weight.assign_sub(gradient)

        scale.update([gradient], ranks, update)  # type: ignore[arg-type]

    return weight, residual, step


def test_the_scale_cancels_exactly() -> None:
    scale = LossScale(initial=1024.0)
    weight = tf.Variable([0.3, 1e-7])
    with tf.GradientTape() as tape:
        loss = scale.multiply(tf.reduce_sum(weight * weight))
    (gradient,) = scale.divide(tape.gradient(loss, [weight]))
    assert gradient.dtype == tf.float32
    np.testing.assert_array_equal(gradient, 2 * weight.numpy())


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["here", "there"])
def test_an_overflow_on_any_rank_skips_the_step_on_all(bad: float, where: str) -> None:
    scale, ranks = LossScale(initial=8.0), Ranks()
    weight, residual, step = make_step(scale, ranks)
    step(tf.constant(0.25))
    assert (float(weight), float(residual), float(scale.scale), int(scale.steps_since)) == (0.75, 1.0, 8.0, 1)
    ranks.other_overflows.assign(float(where == "there"))
    step(tf.constant(bad if where == "here" else 0.25))
    assert (float(weight), float(residual), float(scale.scale), int(scale.steps_since)) == (0.75, 1.0, 4.0, 0)
    assert int(scale.skipped) == 1
    ranks.other_overflows.assign(0.0)
    step(tf.constant(0.25))
    assert int(scale.skipped) == 1
    assert (float(weight), float(residual), float(scale.scale), int(scale.steps_since)) == (0.5, 2.0, 4.0, 1)


def test_the_scale_grows_after_steps_without_overflow() -> None:
    scale = LossScale(initial=8.0, growth_steps=3)
    _, _, step = make_step(scale, Ranks())
    seen = []
    for _ in range(6):
        step(tf.constant(0.0))
        seen.append((float(scale.scale), int(scale.steps_since)))
    assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (32, 0)]


def test_gradients_that_no_scale_makes_finite_stop_training() -> None:
    scale, ranks = LossScale(initial=2.0), Ranks()
    weight, _, step = make_step(scale, ranks)
    step(tf.constant(np.nan))
    with pytest.raises(tf.errors.InvalidArgumentError, match=GRADIENTS_NOT_FINITE) as stopped:
        step(tf.constant(np.nan))
    assert ranks_not_finite(stopped.value.message) == "0"
    assert float(weight) == 1.0

    # A rank whose own gradients are finite names the others, whose samples are to be looked at.
    ranks.other_overflows.assign(1.0)
    with pytest.raises(tf.errors.InvalidArgumentError) as stopped:
        step(tf.constant(0.25))
    assert ranks_not_finite(stopped.value.message) == "1"
    with pytest.raises(tf.errors.InvalidArgumentError) as stopped:
        step(tf.constant(np.nan))
    assert ranks_not_finite(stopped.value.message) == "0, 1"
    assert ranks_not_finite(f"rank 0: {GRADIENTS_NOT_FINITE}, from optimizer step") is None
