"""LAMB as a Keras 3 optimizer."""

from collections.abc import Collection, Sequence
from typing import Any

import keras
from keras import ops

from models.optimizers.layerwise import HalfUpdate, add_state, chosen_by_path, norm, ratio_of_norms


def lamb(
    *,
    excluded: Collection[keras.Variable],
    unadapted: Collection[keras.Variable],
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
) -> "LAMB":
    """Return `LAMB` at learning rate 0; `excluded` get no weight decay, `unadapted` no ratio of norms."""
    return LAMB(
        0.0,
        beta_1=beta_1,
        beta_2=beta_2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        excluded=[variable.path for variable in excluded],
        unadapted=[variable.path for variable in unadapted],
    )


@keras.saving.register_keras_serializable(package="groundswell")
class LAMB(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Adam whose update is scaled, for each variable, to the norm of its weights.

        m = beta_1 * m + (1 - beta_1) * g;  v = beta_2 * v + (1 - beta_2) * g^2          at step t, from 1
        u = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay * w
        w = w - learning_rate * |w| / |u| * u                               (ratio 1 where |w| or |u| is 0)

    An excluded variable has weight_decay = 0; an unadapted variable has the ratio 1.

    Args:
        learning_rate: A float, which may be assigned at each step, or another learning rate of Keras optimizers.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Added to the root of the second moment, positive.
        weight_decay: Coefficient of the decay, 0 or more; inside the ratio, unlike in `keras.optimizers.Lamb`.
        excluded: Exact paths (`variable.path`) of the variables without weight decay.
        unadapted: Exact paths of the variables without ratio.
        **kwargs: Arguments of any Keras optimizer.

    Raises:
        ValueError: a coefficient out of range; when built, a path without exactly one variable.

    Source: You et al. 2020, "Large batch optimization for deep learning", algorithm 2, with the identity for phi.
    Differs: a norm of 0 means a ratio of 1. State and arithmetic of half-precision variables are in float32.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay: float,
        excluded: Sequence[str] = (),
        unadapted: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        """Store the coefficients."""
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} must be in [0, 1), got {beta}")
        if epsilon <= 0:
            raise ValueError(f"epsilon must be positive, got {epsilon}")
        if weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
        # The base class would apply its own weight_decay, outside the ratio.
        super().__init__(learning_rate=learning_rate, weight_decay=None, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.inner_weight_decay = weight_decay
        self.excluded = tuple(excluded)
        self.unadapted = tuple(unadapted)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create both moments of each variable, and find the excluded and unadapted variables."""
        if self.built:
            return
        self._is_excluded = chosen_by_path("excluded", self.excluded, variables)
        self._is_unadapted = chosen_by_path("unadapted", self.unadapted, variables)
        super().build(variables)
        self._first, self._second = add_state(self, variables, ["momentum", "velocity"])

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply the rule of the class to one variable."""
        half = self.begin_update(gradient, variable)
        self.finish_update(half, [norm(each) for each in half.measured], variable, learning_rate)

    def begin_update(self, gradient: Any, variable: Any) -> HalfUpdate:
        """Move both moments; see `InTwoHalves`."""
        index = self._get_variable_index(variable)
        first, second = self._first[index], self._second[index]
        dtype = first.dtype
        gradient, weights = (ops.cast(value, dtype) for value in (gradient, variable))
        step = ops.cast(self.iterations + 1, dtype)
        self.assign(first, self.beta_1 * first + (1 - self.beta_1) * gradient)
        self.assign(second, self.beta_2 * second + (1 - self.beta_2) * ops.square(gradient))
        mean = first / (1 - ops.power(ops.cast(self.beta_1, dtype), step))
        square = second / (1 - ops.power(ops.cast(self.beta_2, dtype), step))
        update = mean / (ops.sqrt(square) + self.epsilon)
        if self.inner_weight_decay and not self._is_excluded[index]:
            update = update + self.inner_weight_decay * weights
        return HalfUpdate(index, update, () if self._is_unadapted[index] else (update, weights))

    def finish_update(self, half: HalfUpdate, norms: Sequence[Any], variable: Any, learning_rate: Any) -> None:
        """Move the variable; see `InTwoHalves`."""
        rate = ops.cast(learning_rate, self._first[half.index].dtype)
        if norms:
            update_norm, weight_norm = norms
            rate = rate * ratio_of_norms(weight_norm, update_norm, update_norm, 1.0)
        self.assign_sub(variable, ops.cast(rate * half.direction, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`, the chosen paths among them."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "weight_decay": self.inner_weight_decay,
            "excluded": list(self.excluded),
            "unadapted": list(self.unadapted),
        }
