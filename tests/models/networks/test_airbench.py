"""Airbench's network for images of 32 x 32 pixels."""

import keras
import numpy as np
import pytest

from models.networks.stages import cut
from tests.models.built import network_of, normal_images


def test_the_published_network_has_2_0_million_weights():
    convolutions, normalisations = 12 * 24 + 9 * (24 * 64 + 64**2 + 64 * 256 + 3 * 256**2), 2 * (2 * 64 + 4 * 256)
    assert (network_of("airbench", width_factor=1.0).count_params(), round(convolutions / 1e6, 1)) == (
        convolutions + 2 * normalisations + 256 * 10,
        2.0,
    )


@pytest.mark.parametrize(("stage", "before"), [(1, "whitening_relu"), (2, "stage1_relu2"), (3, "stage2_relu2")])
def test_convolutions_start_as_the_identity_on_the_channels_that_they_get(stage, before):
    model = network_of("airbench")
    for entry, name in ((before, f"stage{stage}_conv1"), (f"stage{stage}_relu1", f"stage{stage}_conv2")):
        ends = [model.get_layer(entry).output, model.get_layer(name).output]
        given, found = (np.asarray(each) for each in keras.Model(model.inputs, ends)(normal_images()))
        same = min(given.shape[-1], found.shape[-1])
        np.testing.assert_allclose(found[..., :same], given[..., :same], atol=1e-6)
        assert same == found.shape[-1] or np.any(found[..., same:])


def test_dropout_is_before_the_dense_layer():
    names = [layer.name for layer in network_of("airbench", dropout=0.5).layers]
    assert names[-3:] == ["pool_scaled", "dropout", "logits"]


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_a_pipeline_cuts_it_into_stages_that_learn(stages):
    model = network_of("airbench")
    found = cut(model, stages)
    assert (len(found), found[-1].last_layer) == (stages, "logits")
    assert all(stage.network.trainable_variables for stage in found)
    with pytest.raises(ValueError, match=r"can be cut at 6 places .* and 8 stages need 7"):
        cut(model, 8)
