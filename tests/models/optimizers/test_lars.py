"""Every variant of LARS against its source, written again in float64 numpy, and what all variants do."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.sections.optimizers import LARSConfig
from models.optimizers.lars import LARS, VARIANTS

MOMENTUM, DECAY, TRUST, EPSILON = 0.9, 0.03, 0.02, 1e-3
# Up, then down, as a warm-up and a decay; exact in float32, in which Keras keeps the rate.
RATES = [float(np.float32(rate)) for rate in np.concatenate([np.linspace(0.05, 2.0, 20), np.linspace(1.9, 0.01, 30)])]


def norm(array):
    return float(np.sqrt((array * array).sum()))


def by_mlperf(w, steps, decay, adapts, nesterov):
    """The rate scales each gradient before it enters the buffer."""
    v = np.zeros_like(w)
    for rate, g in steps:
        ratio = TRUST * norm(w) / (norm(g) + decay * norm(w) + EPSILON) if adapts else 1.0
        scaled = rate * ratio * (g + decay * w)
        v = MOMENTUM * v + scaled
        w = w - (MOMENTUM * v + scaled if nesterov else v)
    return w


def by_goyal(w, steps, decay, adapts, nesterov):
    """Equation 10: the rate is inside the buffer, which is rescaled whenever the rate changes."""
    v, before = np.zeros_like(w), None
    for rate, g in steps:
        ratio = TRUST * norm(w) / (norm(g) + decay * norm(w) + EPSILON) if adapts else 1.0
        scaled = rate * ratio * (g + decay * w)
        correction = 1.0 if before is None else rate / before
        v = MOMENTUM * correction * v + scaled
        w, before = w - (MOMENTUM * v + scaled if nesterov else v), rate
    return w


def by_apex(w, steps, decay, adapts, nesterov):
    """The gradient is replaced, and plain SGD with momentum, without decay, takes it."""
    buffer = np.zeros_like(w)
    for rate, g in steps:
        adaptive = TRUST * norm(w) / (norm(g) + norm(w) * decay + EPSILON)
        factor = min(adaptive / rate, 1.0) if adapts else 1.0
        replaced = (g + decay * w) * factor
        buffer = MOMENTUM * buffer + replaced
        w = w - rate * (replaced + MOMENTUM * buffer if nesterov else buffer)
    return w


def by_tensorflow_models(w, steps, decay, adapts, nesterov):
    """The decay is added first, and one norm is taken of the sum."""
    v = np.zeros_like(w)
    for rate, g in steps:
        g = g + decay * w
        ratio = TRUST * norm(w) / (norm(g) + EPSILON) if adapts else 1.0
        v = MOMENTUM * v + rate * ratio * g
        w = w - (MOMENTUM * v + rate * ratio * g if nesterov else v)
    return w


REFERENCES = {"mlperf": by_mlperf, "outside": by_goyal, "larc": by_apex, "tensorflow_models": by_tensorflow_models}


def config_of(variant, nesterov=False):
    numbers = {"weight_decay": DECAY, "trust_coefficient": TRUST, "epsilon": EPSILON, "momentum": MOMENTUM}
    return LARSConfig(variant=variant, nesterov=nesterov, **numbers)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 2e-5)])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_fifty_steps_with_a_rate_that_rises_and_falls(variant, nesterov, dtype, tolerance, steps_are_those_of):
    reference = functools.partial(REFERENCES[variant], nesterov=nesterov)
    steps_are_those_of(config_of(variant, nesterov), reference, RATES, dtype=dtype, tolerance=tolerance)


def test_clipping_never_exceeds_the_rate_of_plain_sgd():
    weights, plain = (keras.Variable([[3.0, 4.0]], name="w") for _ in range(2))
    larc = LARS(0.0, **{**LARSConfig(variant="larc", weight_decay=0.0).arguments(), "trust_coefficient": 100.0})
    sgd = keras.optimizers.SGD(0.0, momentum=0.9, nesterov=True)
    for rate in (0.1, 0.1, 0.1, 0.0):
        for optimizer, variable in ((larc, weights), (sgd, plain))[: 2 if rate else 1]:
            optimizer.learning_rate = rate
            optimizer.apply([tf.constant([[0.5, -1.0]])], [variable])
        np.testing.assert_allclose(weights, plain, rtol=1e-6)


def test_ratio_is_one_where_gradient_and_decay_cancel():
    weights = keras.Variable([2.0, 4.0], name="w")
    optimizer = LARS(0.5, **config_of("tensorflow_models").arguments())
    optimizer.apply([tf.constant([-2.0 * DECAY, -4.0 * DECAY])], [weights])
    np.testing.assert_allclose(weights, [2.0, 4.0], rtol=1e-6)


def test_state_has_the_names_and_the_order_that_checkpoints_know():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    lars = LARS(0.0, name="same", **LARSConfig().arguments())
    sgd = keras.optimizers.SGD(0.0, name="same", momentum=0.9)
    for optimizer in (lars, sgd):
        optimizer.build(model.trainable_variables)
    states = [[(each.path, each.dtype) for each in optimizer.variables] for optimizer in (lars, sgd)]
    assert states[0] == states[1]


def test_a_config_written_before_there_were_variants_means_the_first_one():
    config = LARS(0.0, **LARSConfig().arguments(), excluded=["a/gamma"]).get_config()
    del config["variant"], config["unadapted"]
    restored = LARS.from_config(config)
    assert (restored.variant, restored.unadapted) == ("mlperf", ("a/gamma",))


def make_lars(learning_rate, **settings):
    """With the configuration's defaults."""
    return LARS(learning_rate, **{**LARSConfig().arguments(), **settings})


@pytest.mark.parametrize(
    ("weights", "gradient", "decay", "expected"),
    [
        ([0.0, 0.0], [1.0, 2.0], 0.1, [-0.5, -1.0]),
        ([2.0], [0.0], 0.1, [1.9]),  # update = 0.5 * 1 * (0 + 0.1 * 2)
        ([2.0], [0.0], 0.0, [2.0]),
    ],
)
def test_zero_weights_or_a_zero_gradient_take_ratio_one(weights, gradient, decay, expected):
    variable = keras.Variable(np.float32(weights), name="w")
    make_lars(0.5, nesterov=False, weight_decay=decay).apply([tf.constant(gradient)], [variable])
    np.testing.assert_allclose(variable, expected)


def test_rate_can_change_at_every_step_of_a_compiled_function():
    eager, traced = (keras.Variable([[3.0, 4.0]], name="w") for _ in range(2))
    eager_optimizer, optimizer = make_lars(1.0, trust_coefficient=0.1), make_lars(1.0, trust_coefficient=0.1)
    optimizer.build([traced])

    @tf.function(jit_compile=True)
    def train_step(gradient):
        optimizer.apply([gradient], [traced])

    for rate in (0.5, 1.0, 0.1):
        optimizer.learning_rate.assign(rate)
        train_step(tf.constant([[1.0, -1.0]]))
        eager_optimizer.learning_rate = rate
        eager_optimizer.apply([tf.constant([[1.0, -1.0]])], [eager])
    np.testing.assert_allclose(traced, eager, rtol=1e-6)
    assert train_step.experimental_get_tracing_count() == 1
