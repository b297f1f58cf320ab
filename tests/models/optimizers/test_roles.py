"""Roles of variables come from the layers that hold them."""

import keras
import pytest

from conf.sections.optimizers import LARSConfig
from models.optimizers.layerwise import variable_roles, variables_with_roles
from tests.models.built import network_of


def paths(model, roles):
    return [variable.path for variable in variables_with_roles(model, roles)]


def test_a_resnet_has_kernels_gains_shifts_and_the_bias_of_its_head():
    model = network_of("resnet")
    names = [layer.name for layer in model.layers]
    assert {role: set(paths(model, [role])) for role in ("bias", "gain", "shift", "kernel")} == {
        "bias": {"logits/bias"},
        "gain": {f"{name}/gamma" for name in names if "bn" in name},
        "shift": {f"{name}/beta" for name in names if "bn" in name},
        "kernel": {f"{name}/kernel" for name in names if "conv" in name or name == "logits"},
    }
    assert len(paths(model, LARSConfig().excluded_roles)) == 2 * 20 + 1


def test_roles_do_not_come_from_names():
    images = keras.Input((4, 4, 3))
    features = keras.layers.Conv2D(3, 1, use_bias=False, name="bias_bn")(images)
    features = keras.layers.LayerNormalization(name="conv")(features)
    features = keras.layers.GroupNormalization(1, scale=False, name="kernel")(features)
    newest = hasattr(keras.layers, "RMSNormalization")
    if newest:
        features = keras.layers.RMSNormalization(name="dense")(features)
    model = keras.Model(images, keras.layers.Dense(2, name="gamma")(features))
    assert [(each.path, role) for each, role in zip(model.trainable_variables, variable_roles(model), strict=True)] == [
        ("bias_bn/kernel", "kernel"),
        ("conv/gamma", "gain"),
        ("conv/beta", "shift"),
        ("kernel/beta", "shift"),
        *([("dense/scale", "gain")] if newest else []),
        ("gamma/kernel", "kernel"),
        ("gamma/bias", "bias"),
    ]


def test_roles_reach_into_nested_models_and_wrapped_layers_and_skip_frozen_ones():
    inner = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()], name="inner"
    )
    inputs = keras.Input((5, 3))
    features = keras.layers.TimeDistributed(inner)(inputs)
    frozen = keras.layers.BatchNormalization(name="frozen", trainable=False)
    assert variable_roles(
        keras.Model(inputs, keras.layers.TimeDistributed(keras.layers.Dense(2))(frozen(features)))
    ) == ["kernel", "bias", "gain", "shift", "kernel", "bias"]


@pytest.mark.parametrize("roles", [[], ["bias"], ["gain", "shift"], ["kernel", "bias", "gain", "shift"]])
def test_chosen_roles_are_in_the_models_order(roles):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    order = ["kernel", "bias", "gain", "shift"]
    assert [id(each) for each in variables_with_roles(model, roles)] == [
        id(variable) for variable, role in zip(model.trainable_variables, order, strict=True) if role in roles
    ]
