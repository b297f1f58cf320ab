"""LARS as a Keras 3 optimizer, in the published variants."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from models.optimizers.layerwise import (
    ON_TENSORFLOW,
    HalfUpdate,
    add_state,
    chosen_by_path,
    norm,
    ratio_of_norms,
)


@dataclass(frozen=True)
class Variant:
    """The differences between the texts and programs that are called LARS."""

    rate_in_buffer: bool
    """Whether the learning rate is inside the momentum buffer, so that each gradient keeps the rate of its step."""
    norm_of_sum: bool
    """Whether the ratio divides by |g + weight_decay * w|, not by |g| + weight_decay * |w|."""
    clips: bool
    """Whether the rate of a variable is the smaller of the learning rate and the ratio, not their product."""


VARIANTS = {
    "mlperf": Variant(rate_in_buffer=True, norm_of_sum=False, clips=False),
    "outside": Variant(rate_in_buffer=False, norm_of_sum=False, clips=False),
    "larc": Variant(rate_in_buffer=False, norm_of_sum=False, clips=True),
    "tensorflow_models": Variant(rate_in_buffer=True, norm_of_sum=True, clips=False),
}
"""All variants by name; `LARS` has their formulas and sources."""


def lars(
    *,
    excluded: Collection[keras.Variable],
    unadapted: Collection[keras.Variable],
    variant: str,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    trust_coefficient: float,
    epsilon: float,
) -> "LARS":
    """Return `LARS` at learning rate 0; `excluded` get no weight decay, `unadapted` no ratio of norms."""
    return LARS(
        0.0,
        variant=variant,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        trust_coefficient=trust_coefficient,
        epsilon=epsilon,
        excluded=[variable.path for variable in excluded],
        unadapted=[variable.path for variable in unadapted],
    )


@keras.saving.register_keras_serializable(package="groundswell")
class LARS(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Momentum SGD whose rate is scaled, for each variable, by the norm of its weights over the norm of its gradient.

        d = g + weight_decay * w
        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)   (1 where |w| or |g| is 0)
        update = learning_rate * ratio * d
        v = momentum * v - update
        w = w + v                            or, with Nesterov, w + momentum * v - update

    This is the variant "mlperf". The others change these lines:

        "outside":            update = ratio * d;  w = w + learning_rate * (v, or momentum * v - update)
        "larc":               as "outside" with update = min(ratio / learning_rate, 1) * d
        "tensorflow_models":  ratio = trust_coefficient * |w| / (|d| + epsilon)   (1 where |w| or |d| is 0)

    An excluded variable has weight_decay = 0. An unadapted variable has update = learning_rate * d (or d): the **full**
    learning rate, which is 10 or more in published LARS recipes. This rate suits gains and biases; with it, a kernel
    diverges.

    Args:
        learning_rate: A float, which may be assigned at each step, or another learning rate of Keras optimizers.
        momentum: Decay of the momentum buffer, in [0, 1).
        nesterov: Whether to look one momentum step ahead.
        weight_decay: Coefficient of the L2 term inside the update, 0 or more (coupled, unlike `keras.optimizers.SGD`).
        trust_coefficient: The ratio of |update| to |w| at learning rate 1, positive.
        epsilon: Added to the denominator of the ratio, 0 or more.
        excluded: Exact paths (`variable.path`) of the variables without weight decay.
        unadapted: Exact paths of the variables without ratio; None: the excluded ones.
        variant: A name of `VARIANTS`.
        **kwargs: Arguments of any Keras optimizer: name, clipping, loss scale, accumulation.

    Raises:
        ValueError: an unknown variant, a coefficient out of range; when built, a path without exactly one variable.

    Source: "mlperf": You et al. 2017, algorithm 1; MLPerf training, reference of ResNet-50. "outside": Goyal et al.
    2017, equation 9, which equals equation 10 with momentum correction. "larc": LARC of NVIDIA's Apex, with clip=True.
    "tensorflow_models": TensorFlow Model Garden, official/modeling/optimization/lars.py, classic momentum.
    Differs: a norm of 0 means a ratio of 1, so that a layer can leave 0; Apex then also leaves out the decay. State and
    arithmetic of half-precision variables are in float32.
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
        unadapted: Sequence[str] | None = None,
        variant: str = "mlperf",
        **kwargs: Any,
    ) -> None:
        """Store the coefficients."""
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {sorted(VARIANTS)}, got {variant!r}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if trust_coefficient <= 0:
            raise ValueError(f"trust_coefficient must be positive, got {trust_coefficient}")
        if weight_decay < 0 or epsilon < 0:
            raise ValueError(f"weight_decay and epsilon must not be negative, got {weight_decay} and {epsilon}")
        # The base class would apply its own weight_decay, decoupled from the gradient, before every update.
        super().__init__(learning_rate=learning_rate, weight_decay=None, **kwargs)
        self.momentum, self.nesterov = momentum, nesterov
        self.coupled_weight_decay = weight_decay
        self.trust_coefficient, self.epsilon = trust_coefficient, epsilon
        self.excluded = tuple(excluded)
        self.unadapted = self.excluded if unadapted is None else tuple(unadapted)
        self.variant = variant

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create one momentum buffer per variable, and find the excluded and unadapted variables."""
        if self.built:
            return
        self._is_excluded = chosen_by_path("excluded", self.excluded, variables)
        self._is_unadapted = chosen_by_path("unadapted", self.unadapted, variables)
        super().build(variables)
        (self.momentums,) = add_state(self, variables, ["momentum"])

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply the rule of the class to one variable."""
        half = self.begin_update(gradient, variable)
        self.finish_update(half, [norm(each) for each in half.measured], variable, learning_rate)

    def begin_update(self, gradient: Any, variable: Any) -> HalfUpdate:
        """Add the decay to the gradient; see `InTwoHalves`."""
        index = self._get_variable_index(variable)
        gradient, weights = (ops.cast(value, self.momentums[index].dtype) for value in (gradient, variable))
        decay = self._decay(index)
        direction = gradient + decay * weights if decay else gradient
        if self._is_unadapted[index]:
            return HalfUpdate(index, direction)
        return HalfUpdate(index, direction, (weights, direction if VARIANTS[self.variant].norm_of_sum else gradient))

    def finish_update(self, half: HalfUpdate, norms: Sequence[Any], variable: Any, learning_rate: Any) -> None:
        """Move the buffer and the variable; see `InTwoHalves`."""
        variant, buffer, direction = VARIANTS[self.variant], self.momentums[half.index], half.direction
        rate = ops.cast(learning_rate, buffer.dtype)
        inside, outside = (rate, 1.0) if variant.rate_in_buffer else (1.0, rate)
        if norms:
            weight_norm, update_norm = norms
            ratio = self._ratio(weight_norm, update_norm, self._decay(half.index))
            # A rate of 0 takes the first branch.
            inside = inside * (ops.where(ratio >= rate, ops.ones_like(ratio), ratio / rate) if variant.clips else ratio)
        # A part of a variable (`models.optimizers.sharded`) has no memory that a kernel could change.
        in_place = ON_TENSORFLOW and hasattr(variable, "handle") and variable.dtype == buffer.dtype
        if in_place and variant.rate_in_buffer:
            import tensorflow as tf

            # This kernel needs one pass over memory; separate operations need six.
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle,
                accum=buffer.value.handle,
                lr=tf.cast(inside, direction.dtype),
                grad=direction,
                momentum=tf.constant(self.momentum, direction.dtype),
                use_nesterov=self.nesterov,
            )
            return
        update = inside * direction
        self.assign(buffer, self.momentum * buffer - update)
        change = outside * (self.momentum * buffer - update if self.nesterov else buffer)
        self.assign_add(variable, ops.cast(change, variable.dtype))

    def _decay(self, index: int) -> float:
        return 0.0 if self._is_excluded[index] else self.coupled_weight_decay

    def _ratio(self, weight_norm: Any, update_norm: Any, decay: float) -> Any:
        denominator = update_norm + self.epsilon
        if not VARIANTS[self.variant].norm_of_sum:
            denominator = update_norm + decay * weight_norm + self.epsilon
        return ratio_of_norms(weight_norm, update_norm, denominator, self.trust_coefficient)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`, the chosen paths among them."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.coupled_weight_decay,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "excluded": list(self.excluded),
            "unadapted": list(self.unadapted),
            "variant": self.variant,
        }
