"""Every variant of LARS against its source, written again in float64 numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.optimizers import LARSConfig
from models.optimizers.lars import LARS, VARIANTS

STEPS, MOMENTUM, DECAY, TRUST, EPSILON = 50, 0.9, 0.03, 0.02, 1e-3
# Up, then down, as a warm-up and a decay; exact in float32, in which Keras keeps the rate.
RATES = [float(np.float32(rate)) for rate in np.concatenate([np.linspace(0.05, 2.0, 20), np.linspace(1.9, 0.01, 30)])]
VARIABLES = ("both", "decay_only", "ratio_only", "neither")
SHAPES = {"both": (4, 3), "decay_only": (3,), "ratio_only": (2, 2), "neither": (5,)}


def norm(array):
    return float(np.sqrt((array * array).sum()))


def gradients():
    random = np.random.default_rng(1)
    return [{name: random.normal(size=SHAPES[name]) * 10.0 ** random.uniform(-2, 1) for name in VARIABLES}] + [
        {name: random.normal(size=SHAPES[name]) for name in VARIABLES} for _ in range(STEPS - 1)
    ]


def initial():
    random = np.random.default_rng(0)
    return {name: random.normal(size=SHAPES[name]) for name in VARIABLES}


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
        w = w - (MOMENTUM * v + scaled if nesterov else v)
        before = rate
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


def make_lars(variant, *, nesterov, **settings):
    return LARS(
        0.0,
        variant=variant,
        momentum=MOMENTUM,
        nesterov=nesterov,
        weight_decay=DECAY,
        trust_coefficient=TRUST,
        epsilon=EPSILON,
        **settings,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 2e-5)])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_fifty_steps_with_a_rate_that_rises_and_falls(variant, nesterov, dtype, tolerance):
    variables = [keras.Variable(value, dtype=dtype, name=name) for name, value in initial().items()]
    optimizer = make_lars(
        variant,
        nesterov=nesterov,
        excluded=["ratio_only", "neither"],
        unadapted=["decay_only", "neither"],
    )
    optimizer.build(variables)
    for step in range(STEPS):
        optimizer.learning_rate = RATES[step]
        optimizer.apply([tf.constant(gradients()[step][name], dtype) for name in VARIABLES], variables)
        if step not in (0, 1, 19, 20, STEPS - 1):
            continue
        for variable in variables:
            expected = REFERENCES[variant](
                initial()[variable.name],
                [(RATES[s], gradients()[s][variable.name]) for s in range(step + 1)],
                decay=DECAY if variable.name in ("both", "decay_only") else 0.0,
                adapts=variable.name in ("both", "ratio_only"),
                nesterov=nesterov,
            )
            scale = np.abs(expected).max()
            np.testing.assert_allclose(
                variable.numpy() / scale, expected / scale, atol=tolerance, err_msg=f"{variable.name}, step {step}"
            )


def test_the_variants_differ():
    ends = {
        name: reference(
            initial()["both"], [(r, g["both"]) for r, g in zip(RATES, gradients(), strict=True)], 0.03, 1, 0
        )
        for name, reference in REFERENCES.items()
    }
    for name, end in ends.items():
        assert all(np.abs(end - other).max() > 1e-3 for each, other in ends.items() if each != name), name


def test_clipping_never_exceeds_the_rate_of_plain_sgd():
    weights, plain = (keras.Variable([[3.0, 4.0]], name="w") for _ in range(2))
    larc = LARS(0.0, **{**LARSConfig(variant="larc", weight_decay=0.0).arguments(), "trust_coefficient": 100.0})
    sgd = keras.optimizers.SGD(0.0, momentum=0.9, nesterov=True)
    for _ in range(3):
        larc.learning_rate = sgd.learning_rate = 0.1
        for optimizer, variable in ((larc, weights), (sgd, plain)):
            optimizer.apply([tf.constant([[0.5, -1.0]])], [variable])
    np.testing.assert_allclose(weights, plain, rtol=1e-6)
    larc.learning_rate = 0.0
    larc.apply([tf.constant([[0.5, -1.0]])], [weights])
    np.testing.assert_allclose(weights, plain, rtol=1e-6)


def test_ratio_is_one_where_gradient_and_decay_cancel():
    weights = keras.Variable([2.0, 4.0], name="w")
    optimizer = make_lars("tensorflow_models", nesterov=False)
    optimizer.learning_rate = 0.5
    optimizer.apply([tf.constant([-2.0 * DECAY, -4.0 * DECAY])], [weights])
    np.testing.assert_allclose(weights, [2.0, 4.0], rtol=1e-6)


def test_state_has_the_names_and_the_order_that_checkpoints_know():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    lars = LARS(0.0, name="same", **LARSConfig().arguments())
    sgd = keras.optimizers.SGD(0.0, name="same", momentum=0.9)
    for optimizer in (lars, sgd):
        optimizer.build(model.trainable_variables)
    assert [each.path for each in lars.variables] == [each.path for each in sgd.variables]
    assert [each.dtype for each in lars.variables] == [each.dtype for each in sgd.variables]


def test_a_config_written_before_there_were_variants_means_the_first_one():
    config = LARS(0.0, **LARSConfig().arguments(), excluded=["a/gamma"]).get_config()
    del config["variant"], config["unadapted"]
    restored = LARS.from_config(config)
    assert (restored.variant, restored.unadapted) == ("mlperf", ("a/gamma",))


def test_unknown_variants_and_paths_are_rejected():
    with pytest.raises(ValueError, match=r"variant must be one of \['larc', .*got 'apex'"):
        make_lars("apex", nesterov=False)
    with pytest.raises(ValueError, match=r"unadapted must hold paths of exactly one trainable variable .*\['gama'\]"):
        make_lars("larc", nesterov=False, unadapted=["gama"]).build([keras.Variable([1.0], name="gamma")])
