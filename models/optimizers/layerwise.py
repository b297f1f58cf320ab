"""Common parts of optimizers: choice of variables by path or by role in their layer, norms, state in float32."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import keras
from keras import ops

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"

Role = Literal["kernel", "bias", "gain", "shift"]

_NORMALISATIONS = tuple(
    getattr(keras.layers, name)
    for name in ("BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization")
    if hasattr(keras.layers, name)  # not every version of Keras has all these layers: 3.9 lacks the last one
)
_ROLES_IN_NORMALISATIONS: dict[str, Role] = {"gamma": "gain", "scale": "gain", "beta": "shift"}


@dataclass(frozen=True)
class HalfUpdate:
    """The result of the first half of an update, for the second half."""

    index: int
    """The variable's position among the optimizer's variables."""
    direction: Any
    """Tensor of the variable's shape that the rates will multiply."""
    measured: tuple[Any, ...] = ()
    """Tensors whose norms the second half needs; empty for a variable without a ratio of norms."""


@runtime_checkable
class InTwoHalves(Protocol):
    """An optimizer whose update needs norms between two halves.

    If ranks hold parts of the variables, the norms are sums over all ranks. All first halves precede these sums, and
    all second halves follow them. `update_step` runs both halves for one variable.
    """

    def begin_update(self, gradient: Any, variable: Any) -> HalfUpdate:
        """Run the first half, which needs no norm."""

    def finish_update(self, half: HalfUpdate, norms: Sequence[Any], variable: Any, learning_rate: Any) -> None:
        """Change the variable with the norms of all tensors in `half.measured`."""


def chosen_by_path(name: str, paths: Sequence[str], variables: Sequence[keras.Variable]) -> tuple[bool, ...]:
    """Return for each variable whether its path is among `paths`.

    The answer is by position, because `update_step` receives the backend's variable, which has no path.

    Args:
        name: Name of the list, for the message.
        paths: Exact paths (`variable.path`).
        variables: All variables of the optimizer.

    Raises:
        ValueError: a path without exactly one variable.
    """
    known = [variable.path for variable in variables]
    unclear = [path for path in paths if known.count(path) != 1]
    if unclear:
        raise ValueError(f"{name} must hold paths of exactly one trainable variable each, got {unclear}")
    return tuple(path in paths for path in known)


def add_state(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], names: Sequence[str]
) -> list[list[keras.Variable]]:
    """Add state of zeros for each variable, and return one list for each name.

    State of half-precision variables is in float32: increments below 1/256 of a bfloat16 would be lost. Checkpoints
    depend on names and order, which are those of Keras's `add_optimizer_variables`.
    """
    state: list[list[keras.Variable]] = [[] for _ in names]
    for variable in variables:
        for name, found in zip(names, state, strict=True):
            found.append(
                optimizer.add_variable(
                    shape=variable.shape,
                    initializer="zeros",
                    dtype="float64" if variable.dtype == "float64" else "float32",
                    name=f"{variable.path.replace('/', '_')}_{name}",
                )
            )
    return state


def norm(tensor: Any) -> Any:
    """Return the L2 norm over all elements, in the type of the tensor."""
    return ops.sqrt(sum_of_squares(tensor))


def sum_of_squares(tensor: Any) -> Any:
    """Return the sum of the squares of all elements, in the type of the tensor."""
    if ON_TENSORFLOW:  # in one pass, without a tensor of squares
        import tensorflow as tf

        return 2 * tf.nn.l2_loss(tensor)
    return ops.sum(ops.square(tensor))


def ratio_of_norms(weight_norm: Any, update_norm: Any, denominator: Any, coefficient: float) -> Any:
    """Return coefficient * weight_norm / denominator, or 1 if one of the two norms is 0.

    With a ratio of 0, a variable of zeros could not leave 0.
    """
    ratio = ops.divide_no_nan(coefficient * weight_norm, denominator)
    return ops.where(ops.logical_and(weight_norm > 0, update_norm > 0), ratio, ops.ones_like(ratio))


def variable_roles(model: keras.Model) -> list[Role]:
    """Return the role of each of `model.trainable_variables`, in their order.

    "gain" and "shift" are the factors and offsets of normalisation layers, "bias" is the bias of any other layer, and
    "kernel" is every other variable. The layer and the attribute of a variable decide its role, never its name.
    """
    roles: dict[int, Role] = {}
    # Keras has no public list of all layers, nested ones included.
    for layer in model._flatten_layers():
        found: dict[str, Role] = _ROLES_IN_NORMALISATIONS if isinstance(layer, _NORMALISATIONS) else {"bias": "bias"}
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
    return [
        variable
        for variable, role in zip(model.trainable_variables, variable_roles(model), strict=True)
        if role in roles
    ]
