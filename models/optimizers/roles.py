"""The roles of variables in their layers: weight decay and LARS treat gains and biases differently from kernels."""

from collections.abc import Collection
from typing import Literal

import keras

Role = Literal["kernel", "bias", "gain", "shift"]

_NAMES = ("BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization")
# Not every version of Keras has all these layers: 3.9 lacks the last one.
_NORMALISATION_LAYERS = tuple(getattr(keras.layers, name) for name in _NAMES if hasattr(keras.layers, name))
_GAINS, _SHIFTS = ("gamma", "scale"), ("beta",)


def variable_roles(model: keras.Model) -> list[Role]:
    """Return the role of each of `model.trainable_variables`, in their order.

    "gain" and "shift" are the factors and offsets of normalisation layers, "bias" is the bias of any other layer, and
    "kernel" is every other variable. The layer and the attribute of a variable decide its role, never its name.
    """
    roles: dict[int, Role] = {}
    # Keras has no public list of all layers, nested ones included.
    for layer in model._flatten_layers():
        if isinstance(layer, _NORMALISATION_LAYERS):
            found: dict[str, Role] = {**dict.fromkeys(_GAINS, "gain"), **dict.fromkeys(_SHIFTS, "shift")}
        else:
            found = {"bias": "bias"}
        for attribute, role in found.items():
            # The type is not checked: variables are instances of `keras.Variable` only in some versions of Keras.
            variable = getattr(layer, attribute, None)
            if variable is not None:
                roles[id(variable)] = role
    return [roles.get(id(variable), "kernel") for variable in model.trainable_variables]


def variables_with_roles(model: keras.Model, roles: Collection[Role]) -> list[keras.Variable]:
    """Return the variables of `model.trainable_variables` with one of these roles, in their order.

    Source: Goyal et al. 2017, section 5.3, for no weight decay on gains and shifts; MLPerf's LARS for biases too.
    """
    pairs = zip(model.trainable_variables, variable_roles(model), strict=True)
    return [variable for variable, role in pairs if role in roles]
