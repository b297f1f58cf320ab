"""Weights of an earlier training: what is taken by name, shape, band and class, and what starts anew."""

import keras
import numpy as np
import pytest

from models.networks.warm_start import TrainedWeights, freeze, name_of, take_weights
from tests.models.built import network_of


def network(bands, classes, name="resnet", **settings):
    return network_of(name, bands=bands, classes=classes, **settings)


def take(model, earlier, known_bands, known_classes, *, bands, classes="xy"):
    """What the model takes from the earlier one, which has seen these bands and classes."""
    return take_weights(
        model, TrainedWeights(values(earlier), known_bands, known_classes), bands=list(bands), class_names=classes
    )


def values(model):
    return {name_of(each): np.array(each) for each in model.variables}


def test_the_same_bands_and_classes_take_everything():
    earlier, model = network(2, 3, seed=1), network(2, 3)
    taken = take(model, earlier, ["a", "b"], ["x", "y", "z"], bands="ab", classes="xyz")
    assert (len(taken.whole), taken.by_band, taken.new, taken.unused) == (len(model.variables), [], {}, [])
    np.testing.assert_equal(model.get_weights(), earlier.get_weights())


def test_bands_are_taken_by_name_and_those_that_are_new_keep_their_start():
    earlier, model = network(3, 2, seed=1), network(4, 2)
    freeze(model, ["stem_*"])  # which makes no difference
    start = values(model)["stem_conv.kernel"]
    taken = take(model, earlier, ["a", "b", "c"], None, bands=["c", "new", "a", "newer"])
    assert taken.by_band == ["stem_conv.kernel"]
    kernel, before = values(model)["stem_conv.kernel"], values(earlier)["stem_conv.kernel"]
    np.testing.assert_array_equal(kernel[:, :, [0, 2]], before[:, :, [2, 0]])
    np.testing.assert_array_equal(kernel[:, :, [1, 3]], start[:, :, [1, 3]])
    assert "stem_conv.kernel: input channels are taken by the names of their bands" in taken.lines()


def test_whitening_filters_are_taken_only_with_all_of_their_bands():
    earlier, name = network(3, 2, "airbench", side=16, seed=1), "whitening.kernel"
    model = network(3, 2, "airbench", side=16)
    start, taken = values(model)[name], take(model, earlier, ["a", "b", "c"], None, bands=["c", "a", "new"])
    assert taken.new[name] == "the earlier network did not see all of these bands, whose filters belong together"
    np.testing.assert_array_equal(values(model)[name], start)
    assert take(model, earlier, ["a", "b", "c"], None, bands="cab").by_band == [name]
    np.testing.assert_array_equal(values(model)[name], values(earlier)[name][:, :, [2, 0, 1]])


@pytest.mark.parametrize("class_names", [["x", "z"], ["y", "x"], ["x", "y", "z"]])
def test_another_list_of_classes_means_a_new_head(class_names):
    earlier, model = network(2, 2, seed=1), network(2, len(class_names))
    start, taken = values(model), take(model, earlier, ["a", "b"], ["x", "y"], bands="ab", classes=class_names)
    assert taken.new == {"logits.kernel": "the classes are others", "logits.bias": "the classes are others"}
    np.testing.assert_array_equal(values(model)["logits.kernel"], start["logits.kernel"])
    assert "logits.kernel starts from random weights: the classes are others" in taken.lines()


def test_what_is_not_known_goes_by_shape():
    earlier, model = network(2, 3, seed=1), network(4, 2)
    taken = take(model, earlier, None, None, bands="abcd")
    assert set(taken.new) == {"stem_conv.kernel", "logits.kernel", "logits.bias"}
    assert "(7, 7, 4, 16), that of the earlier training (7, 7, 2, 16)" in taken.new["stem_conv.kernel"]


def test_a_deeper_network_leaves_values_unused_or_begins_anew():
    earlier, model = network(2, 2, seed=1, depth=34), network(2, 2)
    taken = take(model, earlier, None, None, bands="ab")
    assert not taken.new
    assert "stage4_block3_conv1.kernel" in taken.unused
    assert any("values of the earlier training are not used, such as" in line for line in taken.lines())
    new = take(earlier, model, None, None, bands="ab").new
    assert new["stage4_block3_conv1.kernel"] == "the earlier training has no such variable"


def test_weights_of_other_names_are_refused():
    other = TrainedWeights({"conv1.kernel": np.zeros((3, 3, 2, 8))}, None, None)
    with pytest.raises(ValueError, match=r"the network has stem_conv\.kernel, the earlier training conv1\.kernel$"):
        take_weights(network(2, 2), other, bands=["a", "b"], class_names="xy")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("stam_*", r"no layer with weights is called 'stam_\*'; names are stem_conv, stem_bn, "),
        ("*", "freeze every layer: nothing is left to train"),
    ],
)
def test_patterns_of_no_layer_and_of_every_layer_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        freeze(network(2, 2), [pattern])


def test_frozen_layers_have_no_gradient_and_keep_their_statistics():
    model = network(2, 2)
    assert freeze(model, ["stem_*", "stage1_block1_conv1"]) == ["stage1_block1_conv1", "stem_bn", "stem_conv"]
    trained = {name_of(each) for each in model.trainable_variables}
    assert not trained & {"stem_conv.kernel", "stem_bn.gamma", "stage1_block1_conv1.kernel"}
    before = values(model)["stem_bn.moving_mean"]
    model({"rgb": np.random.default_rng(0).normal(size=(4, 32, 32, 2))}, training=True)
    np.testing.assert_array_equal(values(model)["stem_bn.moving_mean"], before)


def test_the_head_is_found_whatever_its_name():
    def imported():
        layers = [keras.layers.Dense(3, name=name) for name in ("hidden", "predictions")]
        inner, images = keras.Sequential([keras.Input((4,)), *layers], name="imported"), keras.Input((4,))
        return keras.Model(images, keras.layers.Softmax()(inner(images)))

    taken = take(imported(), imported(), None, "xyz", bands="a", classes="xyw")
    assert ({name.split(".")[-2] for name in taken.new}, set(taken.new.values())) == (
        {"predictions"},
        {"the classes are others"},
    )
    assert len(taken.whole) == 2, "those of the layer before, which is as wide"
