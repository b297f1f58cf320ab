"""Weights of an earlier training: what is taken by name, shape, band and class, and what starts anew."""

import keras
import numpy as np
import pytest

from models.networks.airbench import airbench
from models.networks.resnet import resnet
from models.networks.warm_start import TrainedWeights, freeze, name_of, take_weights

RATES = {"dropout": 0.0, "stochastic_depth": 0.0, "zero_init_residual": True}


def network(bands, classes, *, seed=0, depth=18):
    keras.utils.set_random_seed(seed)
    images = keras.Input((32, 32, bands))
    settings = {"depth": depth, "width_factor": 0.125, **RATES}
    return keras.Model(images, resnet(images, classes=classes, dtype=None, **settings))


def weights_of(model, bands, class_names):
    return TrainedWeights({name_of(each): np.array(each) for each in model.variables}, bands, class_names)


def values(model):
    return {name_of(each): np.array(each) for each in model.variables}


def test_the_same_bands_and_classes_take_everything():
    earlier, model = network(2, 3, seed=1), network(2, 3)
    taken = take_weights(model, weights_of(earlier, ["a", "b"], ["x", "y", "z"]), bands=["a", "b"], class_names="xyz")
    assert len(taken.whole) == len(model.variables)
    assert (taken.by_band, taken.new, taken.unused) == ([], {}, [])
    for own, other in zip(model.get_weights(), earlier.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)


def test_bands_are_taken_by_name_and_those_that_are_new_keep_their_start():
    earlier, model = network(3, 2, seed=1), network(4, 2)
    freeze(model, ["stem_*"])  # which makes no difference
    start = values(model)["stem_conv.kernel"]
    bands = ["c", "new", "a", "newer"]
    taken = take_weights(model, weights_of(earlier, ["a", "b", "c"], None), bands=bands, class_names="xy")
    assert taken.by_band == ["stem_conv.kernel"]
    kernel, before = values(model)["stem_conv.kernel"], values(earlier)["stem_conv.kernel"]
    np.testing.assert_array_equal(kernel[:, :, 0], before[:, :, 2])
    np.testing.assert_array_equal(kernel[:, :, 2], before[:, :, 0])
    np.testing.assert_array_equal(kernel[:, :, [1, 3]], start[:, :, [1, 3]])
    assert "stem_conv.kernel: input channels are taken by the names of their bands" in taken.lines()


def test_bands_in_another_order_are_exchanged():
    earlier, model = network(2, 2, seed=1), network(2, 2)
    take_weights(model, weights_of(earlier, ["a", "b"], None), bands=["b", "a"], class_names="xy")
    np.testing.assert_array_equal(values(model)["stem_conv.kernel"], values(earlier)["stem_conv.kernel"][:, :, ::-1])


def test_whitening_filters_are_taken_only_with_all_of_their_bands():
    def whitening_network(seed):
        keras.utils.set_random_seed(seed)
        images = keras.Input((16, 16, 3))
        return keras.Model(images, airbench(images, classes=2, width_factor=0.125, dropout=0.0, dtype=None))

    earlier, name = whitening_network(1), "whitening.kernel"
    for bands in (["c", "a", "b"], ["c", "a", "new"]):
        model = whitening_network(0)
        start = values(model)[name]
        taken = take_weights(model, weights_of(earlier, ["a", "b", "c"], None), bands=bands, class_names="xy")
        if "new" in bands:
            assert (
                taken.new[name] == "the earlier network did not see all of these bands, whose filters belong together"
            )
            np.testing.assert_array_equal(values(model)[name], start)
        else:
            assert taken.by_band == [name]
            np.testing.assert_array_equal(values(model)[name], values(earlier)[name][:, :, [2, 0, 1]])


@pytest.mark.parametrize("class_names", [["x", "z"], ["y", "x"], ["x", "y", "z"]])
def test_another_list_of_classes_means_a_new_head(class_names):
    earlier, model = network(2, 2, seed=1), network(2, len(class_names))
    start = values(model)
    taken = take_weights(model, weights_of(earlier, ["a", "b"], ["x", "y"]), bands=["a", "b"], class_names=class_names)
    assert taken.new == {"logits.kernel": "the classes are others", "logits.bias": "the classes are others"}
    np.testing.assert_array_equal(values(model)["logits.kernel"], start["logits.kernel"])
    assert "logits.kernel starts anew: the classes are others" in taken.lines()


def test_what_is_not_known_goes_by_shape():
    earlier, model = network(2, 3, seed=1), network(4, 2)
    taken = take_weights(model, weights_of(earlier, None, None), bands=list("abcd"), class_names="xy")
    assert set(taken.new) == {"stem_conv.kernel", "logits.kernel", "logits.bias"}
    assert "(7, 7, 4, 8), that of the earlier training (7, 7, 2, 8)" in taken.new["stem_conv.kernel"]


def test_a_deeper_network_leaves_values_unused_or_begins_anew():
    earlier, model = network(2, 2, seed=1, depth=34), network(2, 2)
    taken = take_weights(model, weights_of(earlier, None, None), bands=["a", "b"], class_names="xy")
    assert not taken.new
    assert "stage4_block3_conv1.kernel" in taken.unused
    assert any("values of the earlier training are not used, such as" in line for line in taken.lines())
    taken = take_weights(earlier, weights_of(model, None, None), bands=["a", "b"], class_names="xy")
    assert taken.new["stage4_block3_conv1.kernel"] == "the earlier training has no such variable"


def test_nothing_in_common_is_refused():
    model = network(2, 2)
    other = TrainedWeights({"conv1.kernel": np.zeros((3, 3, 2, 8))}, None, None)
    with pytest.raises(ValueError, match=r"the network has stem_conv\.kernel, the earlier training conv1\.kernel$"):
        take_weights(model, other, bands=["a", "b"], class_names="xy")


def test_frozen_layers_have_no_gradient_and_keep_their_statistics():
    model = network(2, 2)
    frozen = freeze(model, ["stem_*", "stage1_block1_conv1"])
    assert frozen == ["stage1_block1_conv1", "stem_bn", "stem_conv"]
    trained = {name_of(each) for each in model.trainable_variables}
    assert not trained & {"stem_conv.kernel", "stem_bn.gamma", "stage1_block1_conv1.kernel"}
    before = values(model)["stem_bn.moving_mean"]
    model(np.random.default_rng(0).normal(size=(4, 32, 32, 2)), training=True)
    np.testing.assert_array_equal(values(model)["stem_bn.moving_mean"], before)


def test_patterns_that_fit_nothing_or_everything_are_refused():
    with pytest.raises(ValueError, match=r"no layer with weights is called 'stam_\*'; names are stem_conv, stem_bn, "):
        freeze(network(2, 2), ["stam_*"])
    with pytest.raises(ValueError, match="freeze every layer: nothing is left to train"):
        freeze(network(2, 2), ["*"])


def test_the_head_is_found_whatever_its_name():
    def imported(seed):
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Dense(3, name=name) for name in ("hidden", "predictions")]
        inner = keras.Sequential([keras.Input((4,)), *layers], name="imported")
        images = keras.Input((4,))
        return keras.Model(images, keras.layers.Softmax()(inner(images)))

    earlier, model = imported(1), imported(0)
    taken = take_weights(model, weights_of(earlier, None, "xyz"), bands=["a"], class_names="xyw")
    assert {name.split(".")[-2] for name in taken.new} == {"predictions"}
    assert set(taken.new.values()) == {"the classes are others"}
    assert len(taken.whole) == 2, "those of the layer before, which is as wide"
