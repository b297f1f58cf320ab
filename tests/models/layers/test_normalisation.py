import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.normalisation import FusedBatchNormalization, plain_layers

IMAGES = np.random.default_rng(0).normal(3.0, 2.0, (5, 4, 3, 6)).astype(np.float32)


def pair(**kwargs: object) -> tuple[keras.layers.Layer, keras.layers.Layer]:
    random = np.random.default_rng(1)
    layers = (
        FusedBatchNormalization(momentum=0.9, epsilon=1e-5, **kwargs),
        keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, **kwargs),
    )
    weights = [random.uniform(0.5, 2.0, 6).astype(np.float32) for _ in range(4)]
    for layer in layers:
        layer.build(IMAGES.shape)
        layer.set_weights(weights)
    return layers


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_gradients_and_moving_statistics_are_kerass(training: bool, jit_compile: bool) -> None:
    def run(layer: keras.layers.Layer) -> list[np.ndarray]:
        @tf.function(jit_compile=jit_compile)
        def compute(images: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
            with tf.GradientTape() as tape:
                tape.watch(images)
                outputs = layer(images, training=training)
                value = tf.reduce_sum(outputs**3)
            return outputs, tape.gradient(value, [images, layer.gamma.value, layer.beta.value])

        outputs, gradients = compute(tf.constant(IMAGES))
        return [np.array(value) for value in (outputs, *gradients, *layer.get_weights())]

    fused, plain = pair()
    for own, expected in zip(run(fused), run(plain), strict=True):
        np.testing.assert_allclose(own, expected, rtol=2e-4, atol=2e-4)


def test_a_frozen_layer_uses_and_keeps_its_moving_statistics() -> None:
    fused, plain = pair(trainable=False)
    before = fused.get_weights()
    np.testing.assert_allclose(fused(IMAGES, training=True), plain(IMAGES, training=True), rtol=1e-5, atol=1e-5)
    for old, new in zip(before, fused.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_half_precision_keeps_float_statistics() -> None:
    layer = FusedBatchNormalization(dtype="mixed_bfloat16")
    outputs = layer(tf.cast(IMAGES, tf.bfloat16), training=True)
    assert outputs.dtype == tf.bfloat16
    assert layer.moving_mean.dtype == "float32"


def test_other_ranks_fall_back_to_keras() -> None:
    layer = FusedBatchNormalization()
    np.testing.assert_allclose(
        layer(IMAGES[:, 0, 0], training=True),
        keras.layers.BatchNormalization()(IMAGES[:, 0, 0], training=True),
        rtol=1e-5,
    )


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


def test_the_plain_copy_reaches_into_wrappers_and_cells() -> None:
    with_policy = {"dtype": "mixed_bfloat16"}
    images = keras.Input((4, 4, 3))
    x = keras.layers.SpectralNormalization(keras.layers.Conv2D(2, 1, **with_policy), **with_policy)(images)
    x = keras.layers.TimeDistributed(FusedBatchNormalization(**with_policy), **with_policy)(x)
    x = keras.layers.TimeDistributed(keras.layers.Flatten(**with_policy), **with_policy)(x)
    x = keras.layers.Bidirectional(keras.layers.GRU(3, **with_policy), **with_policy)(x)
    x = keras.layers.RNN(keras.layers.GRUCell(3, **with_policy), **with_policy)(keras.ops.expand_dims(x, 1))
    model = keras.Model(images, x)
    assert "bfloat16" in model.to_json()
    copy = plain_layers(model)
    assert "bfloat16" not in copy.to_json()
    assert "groundswell" not in copy.to_json()
    for own, other in zip(copy.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)
    batch = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)
    np.testing.assert_allclose(copy(batch), keras.ops.cast(model(batch), "float32"), atol=0.05)


def test_the_plain_copy_reaches_into_models_of_the_model_and_keeps_shared_layers_one() -> None:
    shared = keras.layers.Dense(4, name="shared")
    inner_input = keras.Input((5, 5, 3))
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
