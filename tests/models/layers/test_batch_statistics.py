"""Batch norm over the batches of several ranks is that of one rank with all of them; the ranks are threads here."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.normalisation import FusedBatchNormalization, normalise_over, plain_layers, statistics_bytes
from tests.models.meeting import Meeting

RANKS, RANDOM = 2, np.random.default_rng(0)
# The ranks' images differ in mean and scale, so that their own statistics are far from the common ones.
IMAGES = RANDOM.normal(3.0, 2.0, (8, 6, 5, 4)).astype(np.float32)
IMAGES[4:] = 3.0 * IMAGES[4:] - 20.0
TARGETS = RANDOM.normal(size=(8, 3)).astype(np.float32)


class ThreadGroup(Meeting):
    """Sums over threads, in the order of the ranks; remembers the bytes."""

    def __init__(self) -> None:
        super().__init__(RANKS)
        self.bytes: dict[str, int] = {}

    def sum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        self.bytes[name] = int(tf.size(values)) * values.dtype.size
        return tf.add_n(self.all_of(values))


def network(dtype: str = "float32") -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = features = keras.Input((6, 5, 4))
    for number in range(2):
        features = keras.layers.Conv2D(6, 3, use_bias=False, dtype=dtype, name=f"conv{number}")(features)
        features = FusedBatchNormalization(momentum=0.9, dtype=dtype, name=f"bn{number}")(features)
        features = keras.layers.ReLU(dtype=dtype)(features)
    features = keras.layers.Flatten(dtype="float32")(features)
    features = FusedBatchNormalization(name="flat", scale=False)(keras.layers.Dense(5, use_bias=False)(features))
    return keras.Model(inputs, keras.layers.Dense(3)(features))


def gradients(model: keras.Model, images: Any, targets: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(images, training=True) - targets) ** 2)
    return loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])


def of_rank(values: Any, rank: int) -> Any:
    return values[rank * 4 : (rank + 1) * 4]


def trained_together(dtype: str = "float32") -> tuple[ThreadGroup, list[keras.Model], list[Any]]:
    """Models of all ranks, with losses and gradients of their batches."""
    group, models = ThreadGroup(), [network(dtype) for _ in range(RANKS)]
    for model in models:
        normalise_over(model, group)
    own = group.on_ranks(lambda rank: gradients(models[rank], of_rank(IMAGES, rank), of_rank(TARGETS, rank)))
    return group, models, own


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("mixed_bfloat16", 5e-2)])
def test_two_ranks_are_one_with_both_batches(dtype: str, tolerance: float) -> None:
    _, models, both = trained_together(dtype)
    whole = network(dtype)
    loss, expected = gradients(whole, IMAGES, TARGETS)
    np.testing.assert_allclose(np.mean([own for own, _ in both]), loss, rtol=tolerance)
    for first, second, alone in zip(both[0][1], both[1][1], expected, strict=True):
        scale = np.max(np.abs(alone)) + 1e-3
        np.testing.assert_allclose((first + second) / 2 / scale, alone / scale, atol=tolerance)
    for first, second, alone in zip(*[model.non_trainable_variables for model in (*models, whole)], strict=True):
        assert first.dtype == "float32" or "int" in first.dtype
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, alone, rtol=tolerance, atol=tolerance)


def test_a_large_mean_does_not_cancel_once_it_is_known() -> None:
    images = (IMAGES[..., :1] * 0.01 + 1000.0).astype(np.float32)
    group, layers = ThreadGroup(), [FusedBatchNormalization(momentum=0.0, epsilon=1e-9) for _ in range(RANKS)]
    for layer in layers:
        layer.build(images.shape)
        layer.moving_mean.assign([1000.0])
        layer.normalise_over(group, "sums")
    group.on_ranks(lambda rank: layers[rank](of_rank(images, rank), training=True))
    np.testing.assert_allclose(layers[0].moving_variance, [np.var(images.astype(np.float64))], rtol=1e-3)


def test_the_payload_is_what_is_summed() -> None:
    group, models, _ = trained_together()
    # Two layers of 6 channels and one of 5; each has 2 C + 1 floats forward and 2 C backward.
    assert sum(group.bytes.values()) == statistics_bytes(models[0]) == 4 * (2 * (13 + 12) + 11 + 10)
    models[0].trainable = False
    assert statistics_bytes(models[0]) == 0


def test_evaluation_frozen_layers_and_the_plain_copy_need_no_other_rank() -> None:
    model, alone = network(), network()
    normalise_over(model, ThreadGroup())
    np.testing.assert_allclose(model(IMAGES), alone(IMAGES), rtol=1e-6)
    np.testing.assert_allclose(plain_layers(model)(IMAGES, training=True), alone(IMAGES, training=True), rtol=1e-4)
    for layer in model.layers:
        layer.trainable = False
    model(IMAGES, training=True)


@pytest.mark.parametrize(
    ("make_layer", "message"),
    [
        (lambda: keras.layers.BatchNormalization(name="foreign"), "its layer foreign is Keras's own: use models"),
        (lambda: keras.layers.Dense(2), "it has no such layer: use models"),
    ],
    ids=["Keras's own", "none"],
)
def test_models_that_cannot_are_refused(make_layer: Any, message: str) -> None:
    inputs = keras.Input((4,))
    with pytest.raises(ValueError, match=message):
        normalise_over(keras.Model(inputs, make_layer()(inputs)), ThreadGroup())
