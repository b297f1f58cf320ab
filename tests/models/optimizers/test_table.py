"""What all optimizers have in common, and Keras's own ones against float64 numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.sections.optimizers import AdagradConfig, AdamWConfig, LAMBConfig, LARSConfig, OneBitAdamConfig, SGDConfig
from models.optimizers.table import OPTIMIZERS

CONFIGS = {
    "lars": LARSConfig(),
    "lars outside": LARSConfig(variant="outside"),
    "lars larc": LARSConfig(variant="larc", trust_coefficient=0.1),
    "lars tensorflow_models": LARSConfig(variant="tensorflow_models"),
    "lamb": LAMBConfig(),
    "adamw": AdamWConfig(),
    "adagrad": AdagradConfig(),
    "sgd": SGDConfig(),
    "onebit_adam": OneBitAdamConfig(warmup_steps=1),
}


def make(config, excluded=()):
    return OPTIMIZERS[config.name](**{argument: list(excluded) for argument in config.roles()}, **config.arguments())


def test_there_is_one_of_each():
    assert {config.name for config in CONFIGS.values()} == set(OPTIMIZERS)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_state_stays_float32_where_the_arithmetic_is_in_half_precision(name, policy):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, dtype=policy)])
    optimizer = make(CONFIGS[name])
    optimizer.build(model.trainable_variables)
    optimizer.learning_rate = 1.0
    half = policy.removeprefix("mixed_")
    optimizer.apply([tf.fill(each.shape, tf.cast(1e-3, half)) for each in model.trainable_variables])
    floats = [each for each in (*model.variables, *optimizer.variables) if "int" not in each.dtype]
    assert {each.dtype for each in floats} == {"float32"}
    assert len(floats) >= 2 + 1 + 2


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith(("lars", "lamb"))])
def test_state_of_half_precision_weights_is_float32_too(name):
    variable = keras.Variable([[3.0, 4.0]], dtype="bfloat16", name="w")
    full = keras.Variable([[3.0, 4.0]], dtype="float32", name="w")
    for weights in (variable, full):
        optimizer = make(CONFIGS[name])
        optimizer.build([weights])
        optimizer.learning_rate = 30.0 if name.startswith("lars") else 0.1
        optimizer.apply([tf.constant([[0.6, 0.8]], weights.dtype)], [weights])
        assert {each.dtype for each in optimizer.variables if "int" not in each.dtype} == {"float32"}
    assert variable.dtype == "bfloat16"
    np.testing.assert_allclose(tf.cast(variable.value, tf.float32), full, rtol=2**-8)
    assert np.abs(full.numpy() - [[3.0, 4.0]]).max() > 0.02


def adamw(w, steps, decay, adapts):
    """Decay beside the gradient; epsilon is small enough not to matter where it is added."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (rate, g) in enumerate(steps, 1):
        w, m, v = w - rate * decay * w, 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        w = w - rate * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-12)
    return w


def sgd(w, steps, decay, adapts):
    """Nesterov's momentum, with the rate inside the buffer, as Keras has it; decay beside the gradient."""
    v = np.zeros_like(w)
    for rate, g in steps:
        w, v = w - rate * decay * w, 0.7 * v + rate * g
        w = w - (0.7 * v + rate * g)
    return w


def adagrad(w, steps, decay, adapts):
    """Decay beside the gradient; the sum of squares starts at 0.3."""
    total = np.full_like(w, 0.3)
    for rate, g in steps:
        w, total = w - rate * decay * w, total + g * g
        w = w - rate * g / np.sqrt(total + 1e-12)
    return w


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (AdamWConfig(beta_1=0.8, beta_2=0.95, epsilon=1e-12, weight_decay=0.1), adamw),
        (SGDConfig(momentum=0.7, weight_decay=0.1), sgd),
        (AdagradConfig(initial_accumulator_value=0.3, epsilon=1e-12, weight_decay=0.1), adagrad),
    ],
    ids=["adamw", "sgd", "adagrad"],
)
def test_fifty_steps_of_keras_with_an_exclusion(config, reference, rates, steps_are_those_of):
    steps_are_those_of(config, reference, rates, tolerance=2e-5)  # Keras keeps betas and momentum in float32


@pytest.mark.parametrize(
    "config",
    [
        LARSConfig(variant="larc", momentum=0.8, nesterov=False, weight_decay=0.2, trust_coefficient=0.2, epsilon=0.1),
        LAMBConfig(beta_1=0.8, beta_2=0.9, epsilon=1e-5, weight_decay=0.2),
        OneBitAdamConfig(warmup_steps=7, beta_1=0.8, beta_2=0.9, weight_decay=0.01),
    ],
    ids=lambda each: each.name,
)
def test_config_round_trip(config):
    first, second = (keras.Variable([1.0], name=name) for name in ("gamma", "bias"))
    chosen = {argument: [first, second] if argument == "excluded" else [second] for argument in config.roles()}
    optimizer = OPTIMIZERS[config.name](**chosen, **config.arguments())
    found = optimizer.get_config()
    if "unadapted" in chosen:
        assert (found["excluded"], found["unadapted"]) == (["gamma", "bias"], ["bias"])
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(restored) is type(optimizer)
    assert found.items() >= config.arguments().items()
    assert restored.get_config() == found
    for _ in range(2):  # as where Keras compiles a model that it has loaded
        restored.build([first, second])
    assert len({each.path for each in restored.variables}) == len(restored.variables)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        *(("lars", {"momentum": value}, r"momentum must be in \[0, 1\)") for value in (1.0, -0.1)),
        ("lars", {"trust_coefficient": 0.0}, "trust_coefficient must be positive"),
        *(("lars", {name: -1.0}, "must not be negative") for name in ("weight_decay", "epsilon")),
        ("lars", {"variant": "apex"}, r"variant must be one of \['larc', .*got 'apex'"),
        *(("lamb", {name: value}, "must") for name, value in (("beta_1", 1.0), ("beta_2", -0.1), ("epsilon", 0.0))),
        ("lamb", {"weight_decay": -1.0}, "must"),
        *(("onebit_adam", {name: value}, name) for name, value in (("warmup_steps", 0), ("beta_2", 1.0))),
    ],
)
def test_coefficients_out_of_range_are_rejected(name, settings, message):
    config = CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        OPTIMIZERS[name](**dict.fromkeys(config.roles(), ()), **{**config.arguments(), **settings})


@pytest.mark.parametrize("argument", ["excluded", "unadapted"])
@pytest.mark.parametrize("names", [["gama"], ["gamma", "gamma"]])
def test_a_path_must_belong_to_exactly_one_variable(argument, names):
    chosen = {"excluded": [], "unadapted": [], argument: [keras.Variable([1.0], name="gamma")]}
    optimizer = OPTIMIZERS["lars"](**chosen, **LARSConfig().arguments())
    with pytest.raises(ValueError, match=rf"{argument} must hold paths of exactly one trainable variable .*'gamma'"):
        optimizer.build([keras.Variable([1.0], name=name) for name in names])
