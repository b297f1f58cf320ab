"""LARS as a Keras 3 optimizer."""

from collections.abc import Collection, Sequence
from typing import Any

import keras
from keras import ops


def lars(
    *,
    excluded: Collection[keras.Variable],
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    trust_coefficient: float,
) -> "LARS":
    """Return `LARS` at learning rate 0; `excluded` variables get neither weight decay nor the ratio of norms."""
    return LARS(
        0.0,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        trust_coefficient=trust_coefficient,
        excluded=[variable.path for variable in excluded],
    )


@keras.saving.register_keras_serializable(package="groundswell")
class LARS(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Momentum SGD whose rate is scaled, for each variable, by the norm of its weights over that of its gradient.

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)   (1 where |w| or |g| is 0)
        update = learning_rate * ratio * (g + weight_decay * w)
        v = momentum * v - update
        w = w + v                            or, with Nesterov, w + momentum * v - update

    An excluded variable has update = learning_rate * g: no weight decay, and the **full** learning rate, which is 10 or
    more in published LARS recipes. That suits gains and biases; a kernel that is excluded by mistake diverges.

    Args:
        learning_rate: A float, which may be assigned at each step, or what any Keras optimizer takes.
        momentum: Decay of the momentum buffer, in [0, 1).
        nesterov: Whether to look one momentum step ahead.
        weight_decay: Coefficient of the L2 term inside the update, 0 or more (coupled, unlike `keras.optimizers.SGD`).
        trust_coefficient: The ratio of |update| to |w| at learning rate 1, positive.
        epsilon: Added to the denominator of the ratio, 0 or more.
        excluded: Exact paths (`variable.path`) of the variables that get neither decay nor ratio.
        **kwargs: What any Keras optimizer takes: name, clipping, loss scale, accumulation.

    Raises:
        ValueError: a coefficient out of range; when built, an excluded path that not exactly one variable has.

    Source: You et al. 2017, algorithm 1.
    Differs: rate and momentum buffer are coupled as in MLPerf's reference (the rate is inside v), without the momentum
    correction of Goyal et al. 2017, equation 10. A norm of 0 means a ratio of 1, so that a layer can leave 0.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        trust_coefficient: float,
        epsilon: float = 0.0,
        excluded: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        """Store the coefficients."""
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if trust_coefficient <= 0:
            raise ValueError(f"trust_coefficient must be positive, got {trust_coefficient}")
        if weight_decay < 0 or epsilon < 0:
            raise ValueError(f"weight_decay and epsilon must not be negative, got {weight_decay} and {epsilon}")
        # The base class would apply a weight_decay of its own, decoupled from the gradient, before every update.
        super().__init__(learning_rate=learning_rate, weight_decay=None, **kwargs)
        self.momentum = momentum
        self.nesterov = nesterov
        self.coupled_weight_decay = weight_decay
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        self.excluded = tuple(excluded)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create one momentum buffer per variable, and find the excluded variables."""
        if self.built:
            return
        paths = [variable.path for variable in variables]
        unclear = [path for path in self.excluded if paths.count(path) != 1]
        if unclear:
            raise ValueError(f"excluded must hold paths of exactly one trainable variable each, got {unclear}")
        super().build(variables)
        # By position, because update_step receives the backend's variable, which has no path.
        self._is_excluded = tuple(path in self.excluded for path in paths)
        self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply the rule of the class to one variable."""
        index = self._get_variable_index(variable)
        buffer = self.momentums[index]
        gradient = ops.cast(gradient, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        if not self._is_excluded[index]:
            rate = rate * ops.cast(self._trust_ratio(gradient, variable), variable.dtype)
            gradient = gradient + self.coupled_weight_decay * variable
        update = rate * gradient
        self.assign(buffer, self.momentum * buffer - update)
        self.assign_add(variable, self.momentum * buffer - update if self.nesterov else buffer)

    def _trust_ratio(self, gradient: Any, variable: Any) -> Any:
        weight_norm = _norm(variable)
        gradient_norm = _norm(gradient)
        denominator = gradient_norm + self.coupled_weight_decay * weight_norm + self.epsilon
        ratio = ops.divide_no_nan(self.trust_coefficient * weight_norm, denominator)
        return ops.where(ops.logical_and(weight_norm > 0, gradient_norm > 0), ratio, ops.ones_like(ratio))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`, the excluded paths among them."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.coupled_weight_decay,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "excluded": list(self.excluded),
        }


def _norm(tensor: Any) -> Any:
    # In float32: the squares of half floats leave their range at 256 and at 0.0002.
    return ops.sqrt(ops.sum(ops.square(ops.cast(tensor, "float32"))))
