"""ResNet-9 for images of 32 x 32 pixels."""

from models.networks.stages import cut
from tests.models.built import network_of, without_gradient


def test_the_published_network_has_6_5_million_weights():
    convolutions = 9 * (3 * 64 + 64 * 128 + 2 * 128**2 + 128 * 256 + 256 * 512 + 2 * 512**2)
    normalisations, model = 2 * (64 + 3 * 128 + 256 + 3 * 512), network_of("resnet9", width_factor=1.0)
    published = convolutions + 2 * normalisations + 512 * 10 + 10
    assert (
        model.count_params(),
        round(convolutions / 1e6, 1),
        len([layer for layer in model.layers if layer.name.endswith(("conv", "conv1", "conv2", "logits"))]),
    ) == (published, 6.6, 9)


def test_all_that_is_not_behind_a_gain_of_zero_has_a_gradient():
    model = network_of("resnet9")
    paths = {variable.path for variable in model.trainable_variables}
    assert without_gradient(model) == {path for path in paths if "_block_" in path and "bn2" not in path}


def test_a_pipeline_cuts_it_between_blocks_and_not_within_them():
    model = network_of("resnet9")
    assert [[stage.last_layer for stage in cut(model, stages)] for stages in (2, 3)] == [
        ["stage1_block_relu", "logits"],
        ["stage1_relu", "stage2_relu", "logits"],
    ]
