"""The relation between an optimizer's state and the variables of the model."""

from collections.abc import Sequence

import keras


def moments_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the optimizer's variables without its number of updates and its rate, which are equal on every rank."""
    counted = {id(optimizer.iterations), id(optimizer._learning_rate)}
    return [variable for variable in optimizer.variables if id(variable) not in counted]


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
    names = {str(each.path).replace("/", "_"): id(each) for each in trained}
    wanted = {id(each) for each in variables}
    found = []
    for each in moments_of(optimizer):
        owners = [name for name in names if each.name.startswith(f"{name}_")]
        if not owners:
            raise ValueError(f"{optimizer.name} has a variable {each.name} that belongs to none of the network's")
        if names[max(owners, key=len)] in wanted:
            found.append(each)
    return found
