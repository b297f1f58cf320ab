import keras

from models.networks.operations import forward_flops


def test_by_hand() -> None:
    images = keras.Input((8, 8, 3))
    features = keras.layers.Conv2D(5, 3, strides=2, padding="same")(images)  # 4 * 4 pixels, kernel 3 * 3 * 3 * 5
    features = keras.layers.DepthwiseConv2D(3, padding="same")(features)  # 3 * 3 * 5 * 1
    features = keras.layers.BatchNormalization()(features)
    outputs = keras.layers.Dense(7)(keras.layers.GlobalAveragePooling2D()(features))
    expected, model = 2 * (16 * 135 + 16 * 45 + 35), keras.Model(images, outputs)
    assert (
        forward_flops(model),
        forward_flops(keras.Model(images, keras.layers.Activation("softmax")(model(images)))),
    ) == (expected, expected)


def test_separable_transposed_and_wrapped_layers_by_hand() -> None:
    images = keras.Input((8, 8, 3))
    features = keras.layers.SeparableConv2D(5, 3, strides=2, padding="same")(images)  # 3 * 3 * 3 and 3 * 5, 16 pixels
    features = keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same")(features)  # 3 * 3 * 4 * 5, from 16 pixels
    features = keras.layers.SpectralNormalization(keras.layers.Conv2D(2, 1))(features)  # 4 * 2, 64 pixels
    features = keras.layers.Reshape((8, 16))(features)
    outputs = keras.layers.TimeDistributed(keras.layers.Dense(7))(features)  # 16 * 7, 8 times
    assert forward_flops(keras.Model(images, outputs)) == 2 * (16 * (27 + 15) + 16 * 180 + 64 * 8 + 8 * 112)


def test_a_grouped_convolution_has_a_smaller_kernel() -> None:
    images = keras.Input((4, 4, 6))
    assert (
        forward_flops(keras.Model(images, keras.layers.Conv2D(6, 1, groups=3, use_bias=False)(images)))
        == 2 * 16 * 2 * 6
    )
