"""`training.gradient_clipping`: the norm of the mean over the ranks is limited, before every optimizer."""

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from pipelines.training.setup.recipe import make_mode, make_optimizer
from pipelines.training.step.loss_scale import LossScale

OPTIMIZERS = [
    "lars",
    "{name: lars, variant: larc}",
    "lamb",
    "adamw",
    "adagrad",
    "{name: sgd, momentum: 0.0, nesterov: false}",
]


PLAIN = "optimizer={name: sgd, momentum: 0.0, nesterov: false, weight_decay: 0.0}"


def moved(collective: Any, limit: float, scale: LossScale | None = None) -> np.ndarray:
    """By how much a step at the rate 1 moves a kernel whose gradient is the input 3, 0, 0, 0 for every output."""
    inputs = keras.Input((4,), name="a")
    head = keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros", name="head")
    model, config = (
        keras.Model({"a": inputs}, head(inputs)),
        load("smoke", [PLAIN, f"training.gradient_clipping={limit}"]),
    )
    mode = make_mode(config, model, lambda t, z: tf.reduce_sum(z, -1), collective, steps_per_epoch=1, loss_scale=scale)
    mode.optimizer.learning_rate = 1.0
    mode.step({"a": tf.constant([[3.0, 0.0, 0.0, 0.0]])}, tf.zeros((1, 3)))
    return -np.array(head.kernel)


def clipped(gradients: list[np.ndarray], limit: float) -> list[np.ndarray]:
    norm = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients))
    return [(gradient * min(1.0, limit / norm)).astype(np.float32) for gradient in gradients]


@pytest.mark.parametrize("limit", [0.5, 100.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_given_gradients_of_limited_norm(optimizer: str, limit: float) -> None:
    random = np.random.default_rng(0)
    config = load("smoke", [f"optimizer={optimizer}", f"training.gradient_clipping={limit}"])
    steps = [[random.standard_normal((4, 3)).astype(np.float32) * size for size in (1.0, 0.1)] for _ in range(3)]

    def train(clipping: float | None, gradients: list[list[np.ndarray]]) -> list[np.ndarray]:
        inputs = keras.Input((4,))
        layers = [keras.layers.Dense(3, use_bias=False, kernel_initializer="ones") for _ in range(2)]
        model = keras.Model(inputs, [layer(inputs) for layer in layers])
        built = make_optimizer(config.optimizer, model, gradient_clipping=clipping)
        built.learning_rate = 0.1
        for step in gradients:
            built.apply([tf.constant(gradient) for gradient in step], model.trainable_variables)
        return [np.array(variable) for variable in model.trainable_variables]

    found = train(config.training.gradient_clipping, steps)
    for own, expected in zip(found, train(None, [clipped(step, limit) for step in steps]), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-6)
    if limit == 0.5 and "sgd" in optimizer:
        assert not np.allclose(found[0], train(None, steps)[0], rtol=1e-3)


def test_the_mean_over_the_ranks_is_clipped_and_not_what_each_rank_brings() -> None:
    own, other = (np.repeat(np.array([column], np.float32).T, 3, axis=1) for column in ([3, 0, 0, 0], [-2, 1, 0, 0]))
    ranks = SimpleNamespace(rank=0, size=2, allreduce=lambda tensors, name=None: [each + other for each in tensors])
    (expected,) = clipped([(own + other) / 2], 1.0)
    np.testing.assert_allclose(moved(ranks, 1.0), expected, atol=1e-6)
    assert not np.allclose(expected, (clipped([own], 1.0)[0] + clipped([other], 1.0)[0]) / 2, atol=1e-2)


def test_the_loss_scale_is_divided_out_before(one_rank: Any) -> None:
    np.testing.assert_array_equal(moved(one_rank, 0.5, LossScale()), moved(one_rank, 0.5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["exchange.codec=dgc", "optimizer={name: sgd, momentum: 0.0, nesterov: false}"],
            r"exchange\.codec=dgc gives accumulated velocities, and training\.gradient_clipping=1\.0 is for gradients",
        ),
        (
            ["exchange.codec=onebit_adam", "exchange.warmup_steps=5", "optimizer={name: onebit_adam, warmup_steps: 5}"],
            r"exchange\.codec=onebit_adam gives first moments, and training\.gradient_clipping=1\.0 is for gradients",
        ),
    ],
)
def test_what_is_no_gradient_is_not_clipped(settings: list[str], message: str) -> None:
    load("smoke", settings)
    with pytest.raises(ValueError, match=message):
        load("smoke", [*settings, "training.gradient_clipping=1.0"])
