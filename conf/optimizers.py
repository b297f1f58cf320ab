"""The settings of the optimizer."""

from typing import Literal

from pydantic import Field

from conf.section import Section


class OptimizerConfig(Section):
    """LARS, momentum SGD or 1-bit Adam, applied after the exchange."""

    name: Literal["lars", "sgd", "onebit_adam"]
    learning_rate_per_256: float = Field(gt=0)
    """Peak learning rate for a global batch of 256."""
    scaling: Literal["linear", "sqrt"]
    """How the peak follows the global batch size."""
    momentum: float = Field(ge=0, lt=1)
    nesterov: bool
    weight_decay: float = Field(ge=0)
    """Not applied to biases and normalisation parameters; inside the gradient for LARS (L2), beside it for SGD."""
    trust_coefficient: float = Field(gt=0)
    """LARS only."""
    beta_1: float = Field(default=0.9, ge=0, lt=1)
    """1-bit Adam only, which has no use for momentum and nesterov."""
    beta_2: float = Field(default=0.999, ge=0, lt=1)
    """1-bit Adam only."""
    warmup_steps: int = Field(default=0, ge=0)
    """1-bit Adam only: steps of plain Adam; the same as exchange.warmup_steps."""
