"""What all optimizers have in common, and Keras's own ones against float64 numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.optimizers import AdagradConfig, AdamWConfig, LAMBConfig, LARSConfig, OneBitAdamConfig, SGDConfig
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
RATES = [float(np.float32(rate)) for rate in np.concatenate([np.linspace(0.001, 0.05, 20), np.linspace(0.05, 0, 30)])]


def make(config, excluded=()):
    chosen = {argument: list(excluded) for argument in config.roles()}
    return OPTIMIZERS[config.name](**chosen, **config.arguments())


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


def adamw(w, gradients, decay):
    """Decay beside the gradient; epsilon is small enough not to matter where it is added."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), 1):
        w = w - rate * decay * w
        m = 0.8 * m + 0.2 * g
        v = 0.95 * v + 0.05 * g * g
        w = w - rate * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-12)
    return w


def sgd(w, gradients, decay):
    """Nesterov's momentum, with the rate inside the buffer, as Keras has it; decay beside the gradient."""
    v = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        w = w - rate * decay * w
        v = 0.7 * v + rate * g
        w = w - (0.7 * v + rate * g)
    return w


def adagrad(w, gradients, decay):
    """Decay beside the gradient; the sum of squares starts at 0.3."""
    total = np.full_like(w, 0.3)
    for rate, g in zip(RATES, gradients, strict=True):
        w = w - rate * decay * w
        total = total + g * g
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
def test_fifty_steps_of_keras_with_an_exclusion(config, reference):
    random = np.random.default_rng(0)
    initial = [random.normal(size=shape) for shape in ((4, 3), (5,))]
    gradients = [[random.normal(size=value.shape) for value in initial] for _ in RATES]
    kernel, gain = (keras.Variable(value, dtype="float64", name=f"w{i}") for i, value in enumerate(initial))
    optimizer = make(config, excluded=[gain])
    optimizer.build([kernel, gain])
    for rate, gradient in zip(RATES, gradients, strict=True):
        optimizer.learning_rate = rate
        optimizer.apply([tf.constant(g, tf.float64) for g in gradient], [kernel, gain])
    for index, (variable, decay) in enumerate(((kernel, 0.1), (gain, 0.0))):
        expected = reference(initial[index], [gradient[index] for gradient in gradients], decay)
        # Keras keeps betas and momentum in float32.
        np.testing.assert_allclose(variable, expected, atol=2e-5)
        assert np.abs(expected - reference(initial[index], [g[index] for g in gradients], 0.1 - decay)).max() > 1e-2
