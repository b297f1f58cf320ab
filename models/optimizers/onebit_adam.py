"""1-bit Adam as a Keras 3 optimizer, for the codec of the same name."""

from collections.abc import Collection, Sequence
from typing import Any

import keras
from keras import ops


def onebit_adam(
    *,
    excluded: Collection[keras.Variable],
    warmup_steps: int,
    beta_1: float,
    beta_2: float,
    weight_decay: float,
) -> "OneBitAdam":
    """Return `OneBitAdam` at learning rate 0; `excluded` variables get no weight decay."""
    optimizer = OneBitAdam(
        0.0, warmup_steps=warmup_steps, beta_1=beta_1, beta_2=beta_2, weight_decay=weight_decay or None
    )
    optimizer.exclude_from_weight_decay(var_list=list(excluded))
    return optimizer


@keras.saving.register_keras_serializable(package="groundswell")
class OneBitAdam(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Adam, then momentum divided by the root of a frozen second moment; for the codec `onebit_adam`.

        step t <= warmup_steps:  m = beta_1 * m + (1 - beta_1) * g;  v = beta_2 * v + (1 - beta_2) * g^2
        afterwards:              m = the first moment that the exchange gives in place of g;  v as it is
        w = w - learning_rate * sqrt(1 - beta_2^min(t, warmup_steps)) / (1 - beta_1^t) * m / (sqrt(v) + epsilon)

    The exchange must warm up for the same number of steps: it returns gradients in these steps, and first moments
    afterwards. An element whose frozen second moment is 0 does not change: its update would be divided by epsilon
    alone.

    Args:
        learning_rate: A float, which may be assigned at each step, or another learning rate of Keras optimizers.
        warmup_steps: Number of first steps of plain Adam, at least 1; 15 to 25 % of a run in the source's experiments.
        beta_1: Decay of the first moment, the same as the codec's, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Added to the root of the second moment.
        weight_decay: Coefficient of Keras's own decoupled decay; None for none.
        **kwargs: Arguments of any Keras optimizer.

    Raises:
        ValueError: a value out of range.

    Source: Tang et al. 2021, "1-bit Adam", algorithm 1.
    Differs: bias corrections, with which the warm-up is exactly Keras's Adam. They continue afterwards; the correction
    of the second moment is frozen.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        warmup_steps: int,
        beta_1: float,
        beta_2: float,
        weight_decay: float | None,
        epsilon: float = 1e-7,
        **kwargs: Any,
    ) -> None:
        """Store the coefficients."""
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps must be at least 1, for a second moment to freeze; got {warmup_steps}")
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} must be in [0, 1), got {beta}")
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **kwargs)
        self.warmup_steps, self.beta_1, self.beta_2, self.epsilon = warmup_steps, beta_1, beta_2, epsilon

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create both moments of each variable."""
        if self.built:
            return
        super().build(variables)
        self._first, self._second = [], []
        for variable in variables:
            self._first.append(self.add_variable_from_reference(variable, "momentum"))
            self._second.append(self.add_variable_from_reference(variable, "velocity"))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply the rule of the class to one variable."""
        index = self._get_variable_index(variable)
        first, second = self._first[index], self._second[index]
        dtype = variable.dtype
        gradient = ops.cast(gradient, dtype)
        warming_up = self.iterations < self.warmup_steps
        step = ops.cast(self.iterations + 1, dtype)
        moments = ops.minimum(step, float(self.warmup_steps))
        correction = 1 - ops.power(ops.cast(self.beta_1, dtype), step)
        frozen_correction = 1 - ops.power(ops.cast(self.beta_2, dtype), moments)
        advanced = first + (gradient - first) * (1 - self.beta_1)
        self.assign(first, ops.where(warming_up, advanced, gradient))
        squared = second + (ops.square(gradient) - second) * (1 - self.beta_2)
        self.assign(second, ops.where(warming_up, squared, second))
        rate = ops.cast(learning_rate, dtype) * ops.sqrt(frozen_correction) / correction
        update = rate * first / (ops.sqrt(second) + self.epsilon)
        never_moved = ops.logical_and(ops.logical_not(warming_up), ops.equal(second, 0))
        self.assign_sub(variable, ops.where(never_moved, ops.zeros_like(update), update))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`."""
        return {
            **super().get_config(),
            "warmup_steps": self.warmup_steps,
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }
