"""Gradients as an exchange takes them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipelines.training.step.step import make_gradients


@pytest.mark.parametrize("jit_compile", [False, True])
def test_gradients_of_a_table_are_whole_tensors(jit_compile: bool) -> None:
    """As those of a vision transformer's positions are, which come as slices."""
    keras.utils.set_random_seed(0)
    images = keras.Input((4, 2), name="a")
    places = keras.ops.cumsum(keras.ops.ones_like(images[..., 0], dtype="int32"), axis=1) - 1
    table = keras.layers.Embedding(6, 2)
    model = keras.Model({"a": images}, keras.layers.Dense(3)(keras.layers.Flatten()(images + table(places))))
    gradients = make_gradients(
        model, lambda targets, found: tf.reduce_sum(found * targets, -1), jit_compile=jit_compile
    )
    random = np.random.default_rng(0)
    given = {"a": tf.constant(random.normal(size=(5, 4, 2)).astype(np.float32))}
    targets = random.normal(size=(5, 3)).astype(np.float32)
    _, computed = gradients(given, tf.constant(targets), None, None)
    assert [tuple(each.shape) for each in computed] == [tuple(each.shape) for each in model.trainable_variables]
    (of_table,) = (
        each for each, variable in zip(computed, model.trainable_variables, strict=True) if variable is table.embeddings
    )
    expected = np.zeros((6, 2), np.float32)
    expected[:4] = (targets.mean(axis=0) @ model.layers[-1].kernel.numpy().T).reshape(4, 2)
    np.testing.assert_allclose(of_table.numpy(), expected, rtol=1e-5, atol=1e-6)
