"""LARS against steps by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.optimizers import LARSConfig
from models.optimizers.lars import LARS
from models.optimizers.roles import variables_with_roles


def make_lars(learning_rate, **settings):
    """With the configuration's defaults."""
    return LARS(learning_rate, **{**LARSConfig().arguments(), **settings})


def variable(values, name="w"):
    return keras.Variable(np.array(values, np.float32), name=name)


def step(optimizer, weights, gradient):
    optimizer.apply([tf.constant(gradient, tf.float32)], [weights])
    return weights.numpy()


def test_one_step_by_hand():
    weights = variable([3.0, 4.0])
    optimizer = make_lars(0.5, momentum=0.9, nesterov=False, weight_decay=0.1, trust_coefficient=0.01)
    # |w| = 5, |g| = 10: ratio = 0.01 * 5 / (10 + 0.1 * 5) = 0.05 / 10.5
    # update = 0.5 * ratio * ((6, 8) + 0.1 * (3, 4)) = 0.5 * 0.05 / 10.5 * (6.3, 8.4) = (0.015, 0.02)
    np.testing.assert_allclose(step(optimizer, weights, [6.0, 8.0]), [2.985, 3.98], rtol=1e-6)


def test_two_nesterov_steps_by_hand():
    weights = variable([2.0])
    optimizer = make_lars(1.0, momentum=0.5, nesterov=True, weight_decay=0.0, trust_coefficient=0.1)
    # In one dimension ratio * g = 0.1 * |w|: update = 0.2, v = -0.2, w = 2 + 0.5 * -0.2 - 0.2 = 1.7
    np.testing.assert_allclose(step(optimizer, weights, [5.0]), [1.7], rtol=1e-6)
    # update = 0.17, v = 0.5 * -0.2 - 0.17 = -0.27, w = 1.7 + 0.5 * -0.27 - 0.17 = 1.395
    np.testing.assert_allclose(step(optimizer, weights, [5.0]), [1.395], rtol=1e-6)


def test_momentum_carries_the_rate_of_the_step_that_made_it():
    weights = variable([2.0])
    optimizer = make_lars(1.0, momentum=0.5, nesterov=False, weight_decay=0.0, trust_coefficient=0.1)
    step(optimizer, weights, [5.0])  # v = -0.2, w = 1.8
    optimizer.learning_rate = 0.1
    # update = 0.1 * 0.18 = 0.018, v = -0.1 - 0.018, w = 1.682
    np.testing.assert_allclose(step(optimizer, weights, [5.0]), [1.682], rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_step_is_proportional_to_the_weights_for_any_scale_of_the_gradient(scale):
    generator = np.random.default_rng(0)
    initial = generator.normal(size=(4, 5))
    weights = variable(initial)
    optimizer = make_lars(2.0, weight_decay=0.0, nesterov=False, trust_coefficient=0.001)
    change = step(optimizer, weights, scale * generator.normal(size=(4, 5))) - initial
    assert np.linalg.norm(change) == pytest.approx(2.0 * 0.001 * np.linalg.norm(initial), rel=1e-3)


@pytest.mark.parametrize("nesterov", [True, False])
def test_excluded_variables_see_the_full_rate_and_no_decay(nesterov):
    weights, plain = variable([3.0, 4.0], "gain"), variable([3.0, 4.0], "plain")
    lars = make_lars(0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.5, excluded=["gain"])
    sgd = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov)
    for gradient in ([1.0, -2.0], [0.5, 3.0], [0.0, 1.0]):
        np.testing.assert_allclose(step(lars, weights, gradient), step(sgd, plain, gradient), rtol=1e-6)


def test_zero_weights_or_a_zero_gradient_take_ratio_one():
    weights = variable([0.0, 0.0])
    np.testing.assert_allclose(step(make_lars(0.5, nesterov=False), weights, [1.0, 2.0]), [-0.5, -1.0])
    weights = variable([2.0])
    # g = 0: update = 0.5 * 1 * (0 + 0.1 * 2)
    np.testing.assert_allclose(step(make_lars(0.5, nesterov=False, weight_decay=0.1), weights, [0.0]), [1.9])
    weights = variable([2.0])
    np.testing.assert_allclose(step(make_lars(0.5, weight_decay=0.0), weights, [0.0]), [2.0])


def test_epsilon_bounds_the_ratio_of_small_gradients():
    weights = variable([1.0])
    optimizer = make_lars(1.0, nesterov=False, weight_decay=0.0, trust_coefficient=0.1, epsilon=0.5)
    # ratio = 0.1 / (0.5 + 0.5)
    np.testing.assert_allclose(step(optimizer, weights, [0.5]), [0.95], rtol=1e-6)


def test_weight_decay_is_applied_once():
    weights = variable([2.0])
    optimizer = make_lars(1.0, momentum=0.0, nesterov=False, weight_decay=0.5, trust_coefficient=0.1)
    # ratio = 0.1 * 2 / (1 + 0.5 * 2) = 0.1; update = 0.1 * (1 + 0.5 * 2) = 0.2
    np.testing.assert_allclose(step(optimizer, weights, [1.0]), [1.8], rtol=1e-6)


def test_config_round_trip():
    optimizer = make_lars(
        0.25,
        momentum=0.8,
        nesterov=False,
        weight_decay=2e-4,
        trust_coefficient=0.002,
        epsilon=1e-9,
        excluded=("a/gamma", "b/bias"),
        name="layerwise",
        global_clipnorm=5.0,
    )
    config = optimizer.get_config()
    assert config["weight_decay"] == 2e-4
    assert config["excluded"] == ["a/gamma", "b/bias"]
    assert LARS.from_config(config).get_config() == config
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(restored, LARS)
    assert restored.get_config() == config


def test_saved_model_continues_as_if_never_interrupted(tmp_path):
    generator = np.random.default_rng(0)
    batches = [(generator.normal(size=(8, 8, 8, 3)), np.eye(4)[generator.integers(0, 4, 8)]) for _ in range(4)]

    def compiled():
        keras.utils.set_random_seed(0)
        images = keras.Input((8, 8, 3))
        features = keras.layers.Conv2D(8, 3, use_bias=False, name="conv")(images)
        features = keras.layers.ReLU()(keras.layers.BatchNormalization(name="bn")(features))
        logits = keras.layers.Dense(4, name="logits")(keras.layers.Flatten()(features))
        model = keras.Model(images, logits)
        optimizer = make_lars(
            5.0,
            weight_decay=1e-3,
            excluded=[each.path for each in variables_with_roles(model, ["bias", "gain", "shift"])],
        )
        model.compile(optimizer, keras.losses.CategoricalCrossentropy(from_logits=True))
        return model

    uninterrupted, interrupted = compiled(), compiled()
    initial = uninterrupted.get_weights()
    for images, targets in batches:
        uninterrupted.train_on_batch(images, targets)
    for images, targets in batches[:2]:
        interrupted.train_on_batch(images, targets)
    interrupted.save(tmp_path / "model.keras")
    resumed = keras.saving.load_model(tmp_path / "model.keras")
    assert resumed.optimizer.excluded == interrupted.optimizer.excluded == ("bn/gamma", "bn/beta", "logits/bias")
    for images, targets in batches[2:]:
        resumed.train_on_batch(images, targets)
    assert resumed.optimizer.iterations.numpy() == 4
    for ours, theirs in zip(resumed.variables, uninterrupted.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=ours.path)
    assert not any(np.array_equal(before, after) for before, after in zip(initial, resumed.get_weights(), strict=True))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_rate_can_change_at_every_step_of_a_compiled_function(jit_compile):
    eager, traced = variable([[3.0, 4.0]]), variable([[3.0, 4.0]])
    eager_optimizer, optimizer = make_lars(1.0, trust_coefficient=0.1), make_lars(1.0, trust_coefficient=0.1)
    optimizer.build([traced])

    @tf.function(jit_compile=jit_compile)
    def train_step(gradient):
        optimizer.apply([gradient], [traced])

    for rate in (0.5, 1.0, 0.1):
        optimizer.learning_rate.assign(rate)
        train_step(tf.constant([[1.0, -1.0]]))
        eager_optimizer.learning_rate = rate
        step(eager_optimizer, eager, [[1.0, -1.0]])
    np.testing.assert_allclose(traced, eager, rtol=1e-6)
    assert train_step.experimental_get_tracing_count() == 1


def test_excluded_path_must_belong_to_exactly_one_variable():
    with pytest.raises(ValueError, match=r"exactly one trainable variable each, got \['gama'\]"):
        make_lars(0.1, excluded=["gama"]).build([variable([1.0], "gamma")])
    with pytest.raises(ValueError, match="exactly one"):
        make_lars(0.1, excluded=["gamma"]).build([variable([1.0], "gamma"), variable([1.0], "gamma")])


@pytest.mark.parametrize(
    "arguments",
    [{"momentum": 1.0}, {"momentum": -0.1}, {"trust_coefficient": 0.0}, {"weight_decay": -1.0}, {"epsilon": -1.0}],
)
def test_coefficients_out_of_range_are_rejected(arguments):
    with pytest.raises(ValueError, match="must"):
        make_lars(0.1, **arguments)
