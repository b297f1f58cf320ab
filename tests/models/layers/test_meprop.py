"""meProp: the backward pass of the k largest."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.meprop import MeProp, keep_largest_gradients


def run(layer, inputs, upstream):
    """Output, and gradients of inputs and kernel."""
    inputs = tf.Variable(inputs)
    with tf.GradientTape() as tape:
        outputs = layer(inputs)
        value = tf.reduce_sum(outputs * upstream)
    by_input, by_kernel = tape.gradient(value, [inputs, layer.layer.kernel.value])
    return outputs.numpy(), by_input.numpy(), by_kernel.numpy()


@pytest.fixture
def dense():
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(5)
    layer.build((None, 4))
    return layer


@pytest.fixture
def data():
    generator = np.random.default_rng(0)
    return generator.normal(size=(3, 4)).astype(np.float32), generator.normal(size=(3, 5)).astype(np.float32)


def test_by_hand():
    values = tf.Variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    upstream = tf.constant([[1.0, -3.0, 2.0], [0.5, 0.5, -0.1]])
    for unified, expected in ((False, [[0, -3, 0], [0.5, 0, 0]]), (True, [[0, -3, 0], [0, 0.5, 0]])):
        with tf.GradientTape() as tape:
            outputs = keep_largest_gradients(values, 1, unified=unified)
        np.testing.assert_array_equal(outputs, values)
        np.testing.assert_allclose(tape.gradient(outputs, values, output_gradients=upstream), expected)


def test_gradients_are_those_of_the_sparse_upstream(dense, data):
    inputs, upstream = data
    outputs, by_input, by_kernel = run(MeProp(dense, 2), inputs, upstream)
    np.testing.assert_array_equal(outputs, dense(inputs))
    largest = np.argsort(-np.abs(upstream), axis=1)[:, :2]
    sparse = np.zeros_like(upstream)
    np.put_along_axis(sparse, largest, np.take_along_axis(upstream, largest, 1), 1)
    np.testing.assert_allclose(by_kernel, inputs.T @ sparse, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_input, sparse @ np.array(dense.kernel).T, rtol=1e-5, atol=1e-6)


def test_unified_choice_moves_k_units(dense, data):
    _, _, by_kernel = run(MeProp(dense, 2, unified=True), *data)
    assert np.count_nonzero(np.abs(by_kernel).sum(axis=0)) == 2


def test_all_units_change_nothing(dense, data):
    inputs, upstream = data
    _, by_input, by_kernel = run(MeProp(dense, 5), inputs, upstream)
    np.testing.assert_allclose(by_kernel, inputs.T @ upstream, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_input, upstream @ np.array(dense.kernel).T, rtol=1e-5, atol=1e-6)


def test_trains_and_saves(tmp_path):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), MeProp(keras.layers.Dense(8, "relu"), 2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    generator = np.random.default_rng(2)
    inputs = generator.normal(size=(64, 4)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    before = model.evaluate(inputs, targets, verbose=0)
    model.fit(inputs, targets, epochs=20, verbose=0)
    assert model.evaluate(inputs, targets, verbose=0) < before / 4
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0), rtol=1e-5)


def test_k_must_fit(dense):
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        MeProp(dense, 0)
    with pytest.raises(ValueError, match="k=6 is more than the 5 units of layer"):
        MeProp(dense, 6)(np.zeros((1, 4), np.float32))
