"""Airbench's network for images of 32 x 32 pixels."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.networks import AirbenchConfig
from models.networks.airbench import airbench
from models.networks.stages import cut


def network(*, side=32, width_factor=0.25, dropout=0.0, dtype=None):
    keras.utils.set_random_seed(0)
    images = keras.Input((side, side, 3), name="rgb")
    logits = airbench(images, classes=10, width_factor=width_factor, dropout=dropout, dtype=dtype)
    return keras.Model({"rgb": images}, logits)


def images_of(samples=2, side=32):
    return {"rgb": np.random.default_rng(0).normal(size=(samples, side, side, 3)).astype(np.float32)}


def test_the_published_network_has_2_0_million_weights():
    convolutions = 12 * 24 + 9 * (24 * 64 + 64**2 + 64 * 256 + 3 * 256**2)
    normalisations = 2 * (2 * 64 + 4 * 256)
    model = network(width_factor=1.0)
    assert model.count_params() == convolutions + 2 * normalisations + 256 * 10
    assert round(convolutions / 1e6, 1) == 2.0


def test_every_stage_halves_the_side():
    model = network()
    assert [model.get_layer(name).output.shape[1] for name in ("whitening", "stage1_relu2")] == [31, 15]
    assert [model.get_layer(name).output.shape[1] for name in ("stage2_relu2", "stage3_relu2")] == [7, 3]


def test_the_shortest_side_leaves_a_pixel_and_one_less_none():
    side = AirbenchConfig().shortest_side
    model = network(side=side)
    assert model.get_layer("stage3_relu2").output.shape[1:3] == (1, 1)
    assert np.all(np.isfinite(model(images_of(side=side))))
    with pytest.raises(ValueError, match=r"dimension size|Computed output size"):
        network(side=side - 1)


@pytest.mark.parametrize(("stage", "before"), [(1, "whitening_relu"), (2, "stage1_relu2"), (3, "stage2_relu2")])
def test_convolutions_start_as_the_identity_on_the_channels_that_they_get(stage, before):
    model = network()
    for entry, name in ((before, f"stage{stage}_conv1"), (f"stage{stage}_relu1", f"stage{stage}_conv2")):
        ends = [model.get_layer(entry).output, model.get_layer(name).output]
        given, found = (np.asarray(each) for each in keras.Model(model.inputs, ends)(images_of()))
        same = min(given.shape[-1], found.shape[-1])
        np.testing.assert_allclose(found[..., :same], given[..., :same], atol=1e-6)
        assert same == found.shape[-1] or np.any(found[..., same:])


def test_all_that_is_trained_has_a_gradient():
    model = network()
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.nn.log_softmax(model(images_of(8), training=True))[:, 0])
    variables = model.trainable_variables
    gradients = tape.gradient(value, [variable.value for variable in variables])
    assert [v.path for v, gradient in zip(variables, gradients, strict=True) if not np.any(gradient)] == []


def test_dropout_is_before_the_dense_layer():
    names = [layer.name for layer in network(dropout=0.5).layers]
    assert names[-3:] == ["pool_scaled", "dropout", "logits"]


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_a_pipeline_cuts_it_into_stages_that_learn(stages):
    found = cut(network(), stages)
    assert len(found) == stages
    assert found[-1].last_layer == "logits"
    assert all(stage.network.trainable_variables for stage in found)


def test_eight_stages_are_too_many():
    with pytest.raises(ValueError, match=r"can be cut at 6 places .* and 8 stages need 7"):
        cut(network(), 8)


def test_empty_networks_are_refused():
    with pytest.raises(ValueError, match="width_factor must be positive, got 0"):
        network(width_factor=0)
