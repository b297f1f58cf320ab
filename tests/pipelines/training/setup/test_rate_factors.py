"""Factors of the learning rate by layer."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from conf.load import load
from models.networks.warm_start import rate_factors
from pipelines.training.setup.recipe import make_mode, make_rate_factors

STEPS = 5


def two_layers() -> keras.Model:
    """Layers whose gradients do not depend on any weight, so that each one's way is its own."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,), name="a")
    return keras.Model({"a": inputs}, ops.add(*[keras.layers.Dense(3, name=name)(inputs) for name in ("slow", "fast")]))


def weights_after(optimizer: str, rate: float, factors: str, one_rank: Any) -> dict[str, np.ndarray]:
    """The weights of each layer after some steps."""
    config, model = load("smoke", [f"optimizer={optimizer}", f"warm_start.rate_factors={factors}"]), two_layers()
    mode = make_mode(
        config, model, lambda targets, logits: ops.mean(logits * targets, axis=-1), one_rank, steps_per_epoch=STEPS
    )
    mode.optimizer.learning_rate = rate
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        images = {"a": tf.constant(random.normal(size=(6, 4)).astype(np.float32))}
        mode.step(images, tf.constant(random.normal(size=(6, 3)).astype(np.float32)))
    return {layer.name: np.array(layer.kernel) for layer in model.layers if layer.weights}


@pytest.mark.parametrize("optimizer", ["lars", "lamb", "adamw", "adagrad", "sgd"])
def test_a_factor_is_that_of_the_learning_rate(optimizer: str, one_rank: Any) -> None:
    both, tenth, usual = (
        weights_after(optimizer, rate, factors, one_rank)
        for rate, factors in ((0.5, "{'sl*': 0.1}"), (0.05, "{}"), (0.5, "{}"))
    )
    np.testing.assert_allclose(both["slow"], tenth["slow"], rtol=2e-5)
    np.testing.assert_array_equal(both["fast"], usual["fast"])
    assert np.abs(both["slow"] - usual["slow"]).max() > 1e-3


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        # The last name that fits counts, and one with a slash is that of variables.
        ({"*": 0.5, "fast": 1.0}, {"slow/kernel": 0.5, "slow/bias": 0.5}),
        (
            {"*/bias": 2.0, "fast/*": 0.5, "f*/k*": 4.0},
            {"slow/bias": 2.0, "fast/bias": 0.5, "fast/kernel": 4.0},
        ),
    ],
)
def test_names_of_layers_and_variables(factors: dict[str, float], expected: dict[str, float]) -> None:
    assert {variable.path: factor for variable, factor in rate_factors(two_layers(), factors)} == expected


@pytest.mark.parametrize(
    ("frozen", "name", "message"),
    [
        (None, "slaw", "no layer with weights to train is called 'slaw'"),
        ("slow", "slow", "no layer with weights to train is called 'slow'"),
        (None, "s*/gamma", r"no variable of layers 's\*' is called 'gamma'; they have bias, kernel$"),
    ],
)
def test_a_name_of_no_trained_layer_is_one_line(frozen: str | None, name: str, message: str) -> None:
    model, config = two_layers(), load("smoke", [f"warm_start.rate_factors={{'{name}': 0.1}}"])
    if frozen:
        model.get_layer(frozen).trainable = False
    with pytest.raises(ValueError, match=rf"^warm_start\.rate_factors: {message}"):
        make_rate_factors(config.warm_start, model)


def test_a_factor_is_above_zero() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        load("smoke", ["warm_start.rate_factors={slow: 0}"])
