"""Adagrad: Keras's own."""

from collections.abc import Collection

import keras


def adagrad(
    *,
    excluded: Collection[keras.Variable],
    initial_accumulator_value: float,
    epsilon: float,
    weight_decay: float,
) -> keras.optimizers.Adagrad:
    """Return `keras.optimizers.Adagrad` at learning rate 0.

        a = a + g * g
        w = w - learning_rate * g / sqrt(a + epsilon)

    Args:
        excluded: Variables without weight decay.
        initial_accumulator_value: Initial sum of squares `a`, 0 or more.
        epsilon: Added to the sum of squares.
        weight_decay: Coefficient of the decoupled decay, w = w - learning_rate * weight_decay * w.

    Source: Duchi, Hazan, Singer 2011, with diagonal matrices; Dean et al. 2012 for late gradients.
    """
    # Keras takes None for no decay.
    optimizer = keras.optimizers.Adagrad(
        0.0,
        initial_accumulator_value=initial_accumulator_value,
        epsilon=epsilon,
        weight_decay=weight_decay or None,
    )
    optimizer.exclude_from_weight_decay(var_list=list(excluded))
    return optimizer
