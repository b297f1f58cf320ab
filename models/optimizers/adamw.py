"""AdamW: Keras's own."""

from collections.abc import Collection

import keras


def adamw(
    *,
    excluded: Collection[keras.Variable],
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
) -> keras.optimizers.AdamW:
    """Return `keras.optimizers.AdamW` at learning rate 0.

    Args:
        excluded: Variables without weight decay.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Added to the root of the second moment.
        weight_decay: Coefficient of the decoupled decay, w = w - learning_rate * weight_decay * w.

    Source: Loshchilov and Hutter 2019, algorithm 2.
    Differs: in Keras, epsilon is added to the root of the second moment before its bias is corrected.
    """
    optimizer = keras.optimizers.AdamW(0.0, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, weight_decay=weight_decay)
    optimizer.exclude_from_weight_decay(var_list=list(excluded))
    return optimizer
