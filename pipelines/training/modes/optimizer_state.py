"""The relation between an optimizer's state and the variables of the model."""

from collections.abc import Sequence

import keras


def state_of(
    variables: Sequence[keras.Variable], trained: Sequence[keras.Variable], optimizer: keras.optimizers.Optimizer
) -> list[keras.Variable]:
    """Return the optimizer's variables for some of the model's; Keras prefixes their names with the model's paths.

    Args:
        variables: The model's variables, some of `trained`.
        trained: All variables for which the optimizer was built.
        optimizer: The optimizer; its number of updates and its learning rate are left out.

    Raises:
        ValueError: A variable of the optimizer belongs to none of `trained`.
    """
    names = {_name(each): id(each) for each in trained}
    wanted = {id(each) for each in variables}
    counted = {id(optimizer.iterations), id(optimizer._learning_rate)}  # equal on every rank
    found = []
    for each in optimizer.variables:
        if id(each) in counted:
            continue
        owners = [name for name in names if each.name.startswith(f"{name}_")]
        if not owners:
            raise ValueError(f"{optimizer.name} has a variable {each.name} that belongs to none of the network's")
        if names[max(owners, key=len)] in wanted:
            found.append(each)
    return found


def _name(variable: keras.Variable) -> str:
    return str(variable.path).replace("/", "_")
