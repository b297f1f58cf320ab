"""Dropout and stochastic depth from seeds: how much is dropped, who draws the same, what is served."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.augmentation import AugmentedModel, augmentation_seeds
from models.layers.drop import SeededDrop, sample_seeds
from models.layers.normalisation import plain_layers
from models.networks.model import with_probabilities
from tests.models.built import group_of, layers_of, model_of, random_images

SEEDS = augmentation_seeds(0, 0, np.arange(4000))


def drop(features, seeds=SEEDS, rate=0.25, number=1, whole_samples=False):
    with sample_seeds(seeds):
        return SeededDrop(rate, number, whole_samples)(features, training=True).numpy()


def test_each_feature_is_dropped_at_the_rate_and_the_others_keep_the_mean():
    dropped = drop(np.ones((4000, 8), np.float32))
    np.testing.assert_allclose(np.unique(dropped), [0.0, 1 / 0.75], rtol=1e-6)
    # Standard deviation of a mean of 4,000: 0.007; of 32,000: 0.0024.
    np.testing.assert_allclose((dropped == 0).mean(axis=0), 0.25, atol=0.03)
    assert (dropped == 0).mean() == pytest.approx(0.25, abs=0.01)


def assert_whole_samples(dropped, rate, atol):
    lost = (dropped == 0).reshape(len(dropped), -1)
    assert (lost.all(axis=1) == lost.any(axis=1)).all()
    assert lost[:, 0].mean() == pytest.approx(rate, abs=atol)


def test_whole_samples_are_dropped_together():
    assert_whole_samples(drop(np.ones((4000, 2, 3, 4), np.float32), whole_samples=True), 0.25, 0.03)


def test_layers_features_and_epochs_draw_independently():
    ones = np.ones((4000, 2), np.float32)
    first = drop(ones, rate=0.5) == 0
    others = {
        "another feature": first[:, ::-1],
        "another layer": drop(ones, rate=0.5, number=2) == 0,
        "another epoch": drop(ones, augmentation_seeds(0, 1, np.arange(4000)), rate=0.5) == 0,
        "the flip of the augmentation": np.stack([SEEDS & 1, SEEDS >> 1 & 1], 1).astype(bool),
    }
    for name, other in others.items():
        # Of 4,000 fair pairs a half agree, with a standard deviation of 0.008.
        np.testing.assert_allclose((first == other).mean(axis=0), 0.5, atol=0.033, err_msg=name)


def test_a_part_of_a_batch_drops_what_the_whole_batch_does_there():
    features = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    whole = drop(features, SEEDS[:12])
    np.testing.assert_array_equal(
        np.concatenate([drop(features[part], SEEDS[part]) for part in (slice(0, 7), slice(7, 12))]), whole
    )
    assert 0 < (whole == 0).sum() < whole.size


def test_without_training_nothing_is_dropped_and_in_training_seeds_are_needed():
    layer, ones = SeededDrop(0.5, 1, whole_samples=False, name="dropout"), np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(layer(ones), ones)
    with pytest.raises(ValueError, match="layer 'dropout' needs seeds, one per sample"):
        layer(ones, training=True)
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\), got 1"):
        SeededDrop(1.0, 1, whole_samples=False)


GROUPS = [group_of("fine", (16, 16, 2), mean=30_000, std=19_000)]
IMAGES = random_images(GROUPS, 8)


def build(dropout=0.0, stochastic_depth=0.0, **settings):
    rates = {"dropout": dropout, "stochastic_depth": stochastic_depth}
    return model_of("resnet", GROUPS, width_factor=0.125, **rates, **settings)


def test_the_rate_of_a_block_rises_linearly_to_the_last_one():
    drops = layers_of(build(0.3, 0.16).network, SeededDrop)
    assert [layer.rate for layer in drops] == pytest.approx([0.02 * block for block in range(1, 9)] + [0.3])
    assert [(layer.number, layer.whole_samples) for layer in drops] == [*((n, True) for n in range(1, 9)), (0, False)]
    assert not isinstance(build(), AugmentedModel)


@pytest.mark.parametrize(("jit_compile", "precision"), [(False, "float32"), (True, "bfloat16")])
def test_training_is_a_function_of_the_seeds_alone(jit_compile, precision):
    model = build(0.3, 0.5, precision=precision)
    start, forward = model.get_weights(), tf.function(model, jit_compile=jit_compile)

    def trained(seeds):
        model.set_weights(start)
        return forward(IMAGES, training=True, seeds=tf.constant(seeds)).numpy()

    first = trained(SEEDS[:8])
    np.testing.assert_array_equal(trained(SEEDS[:8]), first)
    assert np.abs(trained(SEEDS[8:16]) - first).max() > 1e-3


def test_the_gradient_flows_through_what_is_kept():
    with tf.GradientTape() as tape, sample_seeds(SEEDS[:6]):
        features = tf.Variable(np.ones((6, 4), np.float32))
        value = tf.reduce_sum(SeededDrop(0.5, 1, whole_samples=False)(features, training=True))
    np.testing.assert_array_equal(
        tape.gradient(value, features), drop(np.ones((6, 4), np.float32), SEEDS[:6], rate=0.5)
    )


@pytest.mark.long
def test_the_served_model_has_dropout_of_keras_and_predicts_the_same(tmp_path):
    model, plain = build(0.3, 0.16), build()
    values = {variable.path: variable for variable in model.variables}
    assert len(values) == len(plain.variables)
    for variable in plain.variables:  # in another order
        variable.assign(values[variable.path])
    np.testing.assert_array_equal(model(IMAGES), plain(IMAGES))
    served = with_probabilities(model, "single_label")
    np.testing.assert_array_equal(served(IMAGES), with_probabilities(plain, "single_label")(IMAGES))
    assert "groundswell" not in served.to_json()
    assert [layer.rate for layer in layers_of(served, keras.layers.Dropout)] == pytest.approx(
        [0.02 * block for block in range(1, 9)] + [0.3]
    )
    served.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(IMAGES), served(IMAGES))


def test_keras_dropout_of_whole_samples_means_the_same():
    inputs = keras.Input((2, 3, 4))
    seeded = keras.Model(inputs, SeededDrop(0.5, 1, whole_samples=True)(inputs))
    dropped = plain_layers(seeded)(np.ones((200, 2, 3, 4), np.float32), training=True).numpy()
    assert_whole_samples(dropped, 0.5, 0.2)
    assert dropped.max() == 2.0
