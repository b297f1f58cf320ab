from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.normalisation import FusedBatchNormalization, plain_layers

IMAGES = np.random.default_rng(0).normal(3.0, 2.0, (5, 4, 3, 6)).astype(np.float32)


def pair(**kwargs: object) -> list[keras.layers.Layer]:
    """Ours and Keras's layer, with the same weights."""
    kinds = (FusedBatchNormalization, keras.layers.BatchNormalization)
    layers = [kind(momentum=0.9, epsilon=1e-5, **kwargs) for kind in kinds]
    for layer in layers:
        layer.build(IMAGES.shape)
        layer.set_weights(np.random.default_rng(1).uniform(0.5, 2.0, (4, 6)).astype(np.float32))
    return layers


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_gradients_and_moving_statistics_are_kerass(training: bool, jit_compile: bool) -> None:
    @tf.function(jit_compile=jit_compile)
    def compute(layer: keras.layers.Layer, images: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = layer(images, training=training)
            value = tf.reduce_sum(outputs**3)
        return [outputs, *tape.gradient(value, [images, layer.gamma.value, layer.beta.value])]

    fused, plain = ([*compute(layer, tf.constant(IMAGES)), *layer.get_weights()] for layer in pair())
    for own, expected in zip(fused, plain, strict=True):
        np.testing.assert_allclose(own, expected, rtol=2e-4, atol=2e-4)


def test_other_ranks_fall_back_to_keras() -> None:
    kinds = (FusedBatchNormalization, keras.layers.BatchNormalization)
    own, keras_own = (kind()(IMAGES[:, 0, 0], training=True) for kind in kinds)
    np.testing.assert_allclose(own, keras_own, rtol=1e-5)


def test_the_plain_copy_is_kerass_own_and_equal() -> None:
    inputs = keras.Input((4, 3, 6))
    x = FusedBatchNormalization(name="bn")(keras.layers.Conv2D(6, 1, name="conv")(inputs))
    model = keras.Model(inputs, keras.ops.relu(x) + inputs)
    model(IMAGES, training=True)
    copy = plain_layers(model)
    assert type(copy.get_layer("bn")) is keras.layers.BatchNormalization
    np.testing.assert_allclose(copy(IMAGES), model(IMAGES), rtol=1e-5, atol=1e-5)
    copy.get_layer("conv").bias.assign(np.ones(6))
    assert not np.any(model.get_layer("conv").bias)


def test_the_plain_copy_reaches_into_wrappers_and_cells(dtype_policy: Callable[[str], None]) -> None:
    dtype_policy("mixed_bfloat16")
    model = keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            keras.layers.SpectralNormalization(keras.layers.Conv2D(2, 1)),
            keras.layers.TimeDistributed(FusedBatchNormalization()),
            keras.layers.TimeDistributed(keras.layers.Flatten()),
            keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True)),
            keras.layers.RNN(keras.layers.GRUCell(3)),
        ]
    )
    dtype_policy("float32")
    assert "bfloat16" in model.to_json()
    copy = plain_layers(model)
    assert "bfloat16" not in copy.to_json()
    assert "groundswell" not in copy.to_json()
    np.testing.assert_equal(copy.get_weights(), model.get_weights())
    batch = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)
    np.testing.assert_allclose(copy(batch), keras.ops.cast(model(batch), "float32"), atol=0.05)


def test_the_plain_copy_reaches_into_models_of_the_model_and_keeps_shared_layers_one() -> None:
    shared, inner_input = keras.layers.Dense(4, name="shared"), keras.Input((5, 5, 3))
    inner = keras.Model(inner_input, FusedBatchNormalization(name="bn")(shared(inner_input)), name="inner")
    row = keras.Sequential([keras.Input((5, 5, 4)), FusedBatchNormalization(name="bn_of_row")], name="row")
    images = keras.Input((5, 5, 3))
    model = keras.Model(images, keras.layers.Add()([row(inner(images)), shared(images)]))
    copy = plain_layers(model)
    assert [type(layer).__name__ for layer in copy._flatten_layers()].count("Dense") == 1
    assert not any(isinstance(layer, FusedBatchNormalization) for layer in copy._flatten_layers())
    assert len(copy.weights) == len(model.weights) == 2 + 4 + 4
    batch = np.random.default_rng(0).normal(size=(2, 5, 5, 3)).astype(np.float32)
    np.testing.assert_allclose(copy(batch, training=True), model(batch, training=True), rtol=1e-5, atol=1e-6)
