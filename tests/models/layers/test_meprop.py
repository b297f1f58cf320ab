"""meProp: the backward pass of the k largest."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.meprop import MeProp

INPUTS, UPSTREAM = (np.random.default_rng(0).normal(size=(3, width)).astype(np.float32) for width in (4, 5))


@pytest.mark.parametrize(("k", "unified"), [(2, False), (2, True), (5, False)])
def test_gradients_are_those_of_the_sparse_upstream(k, unified):
    dense, inputs = keras.layers.Dense(5), tf.Variable(INPUTS)
    with tf.GradientTape() as tape:
        outputs = MeProp(dense, k, unified=unified)(inputs)
        value = tf.reduce_sum(outputs * UPSTREAM)
    by_input, by_kernel = tape.gradient(value, [inputs, dense.kernel.value])
    np.testing.assert_array_equal(outputs, dense(INPUTS))
    sizes = np.abs(UPSTREAM)
    if unified:
        sizes = np.tile(sizes.sum(axis=0), (3, 1))
    sparse = np.where(sizes >= np.sort(sizes, axis=1)[:, [-k]], UPSTREAM, 0)
    np.testing.assert_allclose(by_kernel, INPUTS.T @ sparse, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_input, sparse @ np.array(dense.kernel).T, rtol=1e-5, atol=1e-6)


def test_a_model_with_it_saves_and_loads(tmp_path):
    model = keras.Sequential([keras.Input((4,)), MeProp(keras.layers.Dense(8, "relu"), 2), keras.layers.Dense(1)])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(INPUTS), model(INPUTS), rtol=1e-5)
    assert (loaded.layers[0].k, loaded.layers[0].unified) == (2, False)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda dense: MeProp(dense, 0), "k must be at least 1, got 0"),
        (lambda dense: MeProp(dense, 6)(np.zeros((1, 4), np.float32)), "k=6 is more than the 5 units of layer"),
    ],
    ids=["0", "6"],
)
def test_k_must_fit(use, message):
    with pytest.raises(ValueError, match=message):
        use(keras.layers.Dense(5))
