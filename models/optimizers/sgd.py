"""Momentum SGD: Keras's own."""

from collections.abc import Collection

import keras


def sgd(
    *, excluded: Collection[keras.Variable], momentum: float, nesterov: bool, weight_decay: float
) -> keras.optimizers.SGD:
    """Return `keras.optimizers.SGD` at learning rate 0.

    Args:
        excluded: Variables without weight decay.
        momentum: Decay of the momentum buffer, in [0, 1).
        nesterov: Whether to look one momentum step ahead.
        weight_decay: Coefficient of the decoupled decay, w = w - learning_rate * weight_decay * w, which is not part of
            the momentum.
    """
    # Keras takes None for no decay.
    optimizer = keras.optimizers.SGD(0.0, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay or None)
    optimizer.exclude_from_weight_decay(var_list=list(excluded))
    return optimizer
