"""LAMB against the paper, written again in float64 numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.optimizers import LAMBConfig
from models.optimizers.lamb import LAMB

SHAPES = {"both": (4, 3), "decay_only": (3,), "ratio_only": (2, 2), "neither": (5,)}
RATES = [float(np.float32(rate)) for rate in np.concatenate([np.linspace(0.001, 0.05, 20), np.linspace(0.05, 0, 30)])]


def make_lamb(**settings):
    return LAMB(0.0, **{**LAMBConfig().arguments(), **settings})


def by_the_paper(w, gradients, *, decay, adapts):
    """Algorithm 2, with beta_1 = 0.8, beta_2 = 0.95 and epsilon = 1e-4."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), 1):
        m = 0.8 * m + 0.2 * g
        v = 0.95 * v + 0.05 * g * g
        r = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-4)
        u = r + decay * w
        ratio = np.linalg.norm(w) / np.linalg.norm(u) if adapts else 1.0
        w = w - rate * ratio * u
    return w


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 2e-5)])
def test_fifty_steps_with_a_rate_that_rises_and_falls(dtype, tolerance):
    random = np.random.default_rng(0)
    initial = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    gradients = [{name: random.normal(size=shape) for name, shape in SHAPES.items()} for _ in RATES]
    variables = [keras.Variable(value, dtype=dtype, name=name) for name, value in initial.items()]
    optimizer = make_lamb(
        beta_1=0.8,
        beta_2=0.95,
        epsilon=1e-4,
        weight_decay=0.1,
        excluded=["ratio_only", "neither"],
        unadapted=["decay_only", "neither"],
    )
    optimizer.build(variables)
    for rate, gradient in zip(RATES, gradients, strict=True):
        optimizer.learning_rate = rate
        optimizer.apply([tf.constant(gradient[variable.name], dtype) for variable in variables], variables)
    for variable in variables:
        expected = by_the_paper(
            initial[variable.name],
            [gradient[variable.name] for gradient in gradients],
            decay=0.1 if variable.name in ("both", "decay_only") else 0.0,
            adapts=variable.name in ("both", "ratio_only"),
        )
        assert np.abs(expected - initial[variable.name]).max() > 0.05
        np.testing.assert_allclose(variable.numpy(), expected, atol=tolerance, err_msg=variable.name)


def test_without_decay_and_exclusions_it_is_that_of_keras():
    random = np.random.default_rng(0)
    value = random.normal(size=(5, 4)).astype(np.float32)
    ours, theirs = keras.Variable(value, name="w"), keras.Variable(value, name="w")
    optimizer, reference = make_lamb(weight_decay=0.0), keras.optimizers.Lamb(0.01, epsilon=1e-6)
    for _ in range(5):
        gradient = tf.constant(random.normal(size=(5, 4)), tf.float32)
        optimizer.learning_rate = 0.01
        optimizer.apply([gradient], [ours])
        reference.apply([gradient], [theirs])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_variables_of_zeros_move():
    weights = keras.Variable([0.0, 0.0], name="w")
    optimizer = make_lamb(weight_decay=0.1)
    optimizer.learning_rate = 0.5
    optimizer.apply([tf.constant([1.0, -2.0])], [weights])
    # Adam's first step is the sign of the gradient.
    np.testing.assert_allclose(weights, [-0.5, 0.5], rtol=1e-5)


def test_config_round_trip():
    optimizer = make_lamb(weight_decay=0.2, excluded=("a/gamma",), unadapted=("b/bias",), name="by_layer")
    config = optimizer.get_config()
    assert (config["weight_decay"], config["excluded"], config["unadapted"]) == (0.2, ["a/gamma"], ["b/bias"])
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(restored, LAMB)
    assert restored.get_config() == config


@pytest.mark.parametrize("arguments", [{"beta_1": 1.0}, {"beta_2": -0.1}, {"epsilon": 0.0}, {"weight_decay": -1.0}])
def test_coefficients_out_of_range_are_rejected(arguments):
    with pytest.raises(ValueError, match="must"):
        make_lamb(**arguments)
