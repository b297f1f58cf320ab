from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE
from pipelines.training.step.loss_scale import LossScale, ranks_not_finite


class Trained:
    """A weight and a residual that steps change unless they are skipped, on this rank and another one."""

    def __init__(self, **settings: Any) -> None:
        self.scale, self.weight, self.residual = LossScale(**settings), tf.Variable(1.0), tf.Variable(0.0)
        self.other_overflows, self._step = tf.Variable(tf.zeros(2)), tf.function(self._update)

    def _update(self, gradient: tf.Tensor) -> None:
        def update() -> None:
            self.residual.assign_add(1.0)
            self.weight.assign_sub(gradient)

        ranks: Any = SimpleNamespace(
            rank=0, size=2, allreduce=lambda tensors, name=None: [each + self.other_overflows for each in tensors]
        )
        self.scale.update([gradient], ranks, update)

    def step(self, gradient: float, *, other_overflows: bool = False) -> tuple[float, float, float, int, int]:
        """Take a step; weight, residual, scale, steps since it changed, and steps that were skipped."""
        self.other_overflows.assign([0.0, float(other_overflows)])
        self._step(tf.constant(gradient))
        counts = int(self.scale.steps_since), int(self.scale.skipped)
        return float(self.weight), float(self.residual), float(self.scale.scale), *counts


def test_the_scale_cancels_exactly() -> None:
    scale, weight = LossScale(initial=1024.0), tf.Variable([0.3, 1e-7])
    with tf.GradientTape() as tape:
        loss = scale.multiply(tf.reduce_sum(weight * weight))
    (gradient,) = scale.divide(tape.gradient(loss, [weight]))
    assert gradient.dtype == tf.float32
    np.testing.assert_array_equal(gradient, 2 * weight.numpy())


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["here", "there"])
def test_an_overflow_on_any_rank_skips_the_step_on_all(bad: float, where: str) -> None:
    trained = Trained(initial=8.0)
    found = [
        trained.step(0.25),
        trained.step(bad if where == "here" else 0.25, other_overflows=where == "there"),
        trained.step(0.25),
    ]
    assert found == [(0.75, 1.0, 8.0, 1, 0), (0.75, 1.0, 4.0, 0, 1), (0.5, 2.0, 4.0, 1, 1)]


def test_the_scale_grows_after_steps_without_overflow() -> None:
    trained = Trained(initial=8.0, growth_steps=3)
    assert [trained.step(0.0)[2:4] for _ in range(6)] == [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (32, 0)]


def test_gradients_that_no_scale_makes_finite_stop_training() -> None:
    trained = Trained(initial=2.0)
    trained.step(np.nan)
    # A rank whose own gradients are finite names the others, whose samples are to be looked at.
    for gradient, other_overflows, named in ((np.nan, False, "0"), (0.25, True, "1"), (np.nan, True, "0, 1")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=GRADIENTS_NOT_FINITE) as stopped:
            trained.step(gradient, other_overflows=other_overflows)
        assert ranks_not_finite(stopped.value.message) == named
    assert (float(trained.weight), ranks_not_finite(f"rank 0: {GRADIENTS_NOT_FINITE}, from optimizer step")) == (
        1.0,
        None,
    )
