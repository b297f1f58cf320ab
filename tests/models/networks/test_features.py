"""The features of a classifier, beside those of the same layers called one by one."""

import keras
import numpy as np
import pytest

from models.networks.features import features_and_outputs

CLASSES = 4


IMAGES = {"bands": np.random.default_rng(1).standard_normal((5, 6, 6, 2)).astype(np.float32)}


def parts_of(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    """Features and outputs of the images."""
    found = np.asarray(features_and_outputs(model, CLASSES)(IMAGES))
    return found[:, :-CLASSES], found[:, -CLASSES:]


def network(nested: bool, head: bool = True) -> keras.Model:
    """A small classifier, whose squeeze-and-excite layer has as many units as there are classes."""
    keras.utils.set_random_seed(0)
    images = keras.Input((6, 6, 2), name="bands")
    maps = keras.layers.Conv2D(CLASSES, 3)(images)
    gates = keras.layers.Dense(CLASSES, activation="sigmoid", name="gates")(maps)
    pooled = keras.layers.GlobalAveragePooling2D(name="pool")(keras.layers.Multiply()([maps, gates]))
    outputs = keras.layers.Dense(CLASSES, name="logits")(pooled) if head else pooled
    inner, outer = keras.Model(images, outputs, name="inner"), keras.Input((6, 6, 2), name="bands")
    probabilities = keras.layers.Activation("softmax")(inner(outer) if nested else inner.output)
    return keras.Model({"bands": outer if nested else images}, probabilities)


@pytest.mark.parametrize("nested", [False, True])
def test_they_are_the_input_of_the_last_dense_layer_that_is_called(nested):
    model = network(nested)
    features, outputs = parts_of(model)
    assert features.shape == (5, CLASSES)
    np.testing.assert_allclose(outputs, model(IMAGES), rtol=1e-6)
    (head,) = [layer for layer in model._flatten_layers() if layer.name == "logits"]
    np.testing.assert_allclose(
        keras.ops.softmax(features @ np.asarray(head.kernel) + np.asarray(head.bias)), outputs, rtol=1e-5
    )


def test_the_head_may_be_a_convolution_of_one_pixel():
    images = keras.Input((6, 6, 2), name="bands")
    pooled = keras.layers.GlobalAveragePooling2D(keepdims=True)(keras.layers.Conv2D(7, 3)(images))
    head = keras.layers.Conv2D(CLASSES, 1, name="logits")
    features, outputs = parts_of(keras.Model({"bands": images}, keras.layers.Flatten()(head(pooled))))
    assert features.shape == (5, 7)
    np.testing.assert_allclose(outputs, features @ np.asarray(head.kernel)[0, 0] + np.asarray(head.bias), rtol=1e-5)


def test_a_model_without_such_a_head_is_refused():
    with pytest.raises(ValueError, match="has no dense layer with 7 units, one for each class"):
        features_and_outputs(network(nested=False), 7)
    function = features_and_outputs(network(nested=False, head=False), CLASSES)
    with pytest.raises(ValueError, match=r"takes an input of shape \(5, 4, 4, 4\), expected \(batch, features\)"):
        function(IMAGES)
