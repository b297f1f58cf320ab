"""Factors of the learning rate by layer."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from conf.load import load
from models.networks.warm_start import rate_factors
from pipelines.training.recipe import make_exchange, make_optimizer, make_rate_factors
from pipelines.training.step import make_train_step

STEPS = 5


def two_layers() -> keras.Model:
    """Layers whose gradients do not depend on any weight, so that each one's way is its own."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,), name="a")
    sums = [keras.layers.Dense(3, name=name)(inputs) for name in ("slow", "fast")]
    return keras.Model({"a": inputs}, ops.add(*sums))


def weights_after(optimizer: str, rate: float, factors: str, one_rank: Any) -> dict[str, np.ndarray]:
    """The weights of each layer after some steps."""
    config = load("smoke", [f"optimizer={optimizer}", f"warm_start.rate_factors={factors}"])
    model = two_layers()
    made = make_optimizer(config.optimizer, model)
    made.learning_rate = rate
    step = make_train_step(
        model,
        lambda targets, logits: ops.mean(logits * targets, axis=-1),
        made,
        make_exchange(config, one_rank),
        jit_compile=False,
        rate_factors=make_rate_factors(config, model),
    )
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        images = {"a": tf.constant(random.normal(size=(6, 4)).astype(np.float32))}
        step(images, tf.constant(random.normal(size=(6, 3)).astype(np.float32)))
    return {layer.name: np.array(layer.kernel) for layer in model.layers if layer.weights}


@pytest.mark.parametrize("optimizer", ["lars", "lamb", "adamw", "adagrad", "sgd"])
def test_a_factor_is_that_of_the_learning_rate(optimizer: str, one_rank: Any) -> None:
    both = weights_after(optimizer, 0.5, "{'sl*': 0.1}", one_rank)
    np.testing.assert_allclose(both["slow"], weights_after(optimizer, 0.05, "{}", one_rank)["slow"], rtol=2e-5)
    usual = weights_after(optimizer, 0.5, "{}", one_rank)
    np.testing.assert_array_equal(both["fast"], usual["fast"])
    assert np.abs(both["slow"] - usual["slow"]).max() > 1e-3


def test_the_last_name_that_fits_counts() -> None:
    model = two_layers()
    found = rate_factors(model, {"*": 0.5, "fast": 1.0})
    assert [(variable.path, factor) for variable, factor in found] == [("slow/kernel", 0.5), ("slow/bias", 0.5)]


def test_a_name_with_a_slash_is_that_of_variables() -> None:
    model = two_layers()
    found = rate_factors(model, {"*/bias": 2.0, "fast/*": 0.5, "f*/k*": 4.0})
    assert {variable.path: factor for variable, factor in found} == {
        "slow/bias": 2.0,
        "fast/bias": 0.5,
        "fast/kernel": 4.0,
    }
    config = load("smoke", ["warm_start.rate_factors={'s*/gamma': 64}"])
    message = r"^warm_start\.rate_factors: no variable of layers 's\*' is called 'gamma'; they have bias, kernel$"
    with pytest.raises(ValueError, match=message):
        make_rate_factors(config, model)


@pytest.mark.parametrize(("frozen", "name"), [(None, "slaw"), ("slow", "slow")])
def test_a_name_of_no_trained_layer_is_one_line(frozen: str | None, name: str) -> None:
    model = two_layers()
    if frozen:
        model.get_layer(frozen).trainable = False
    config = load("smoke", [f"warm_start.rate_factors={{{name}: 0.1}}"])
    message = rf"^warm_start\.rate_factors: no layer with weights to train is called '{name}'"
    with pytest.raises(ValueError, match=message):
        make_rate_factors(config, model)
    with pytest.raises(ValueError, match="greater than 0"):
        load("smoke", ["warm_start.rate_factors={slow: 0}"])
