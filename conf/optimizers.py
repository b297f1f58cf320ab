"""The settings of every optimizer, by name; their defaults are stated here only."""

from typing import Annotated, Any, Literal

from pydantic import Field

from conf.section import Member, member_names

Role = Literal["kernel", "bias", "gain", "shift"]


class OptimizerBase(Member):
    """What all optimizers share: the learning rate's peak, and which variables weight decay leaves out."""

    learning_rate_per_256: float = Field(default=0.1, gt=0)
    """Peak learning rate for a global batch of 256."""
    scaling: Literal["linear", "sqrt"] = "linear"
    """How the peak follows the global batch size."""
    weight_decay: float = Field(default=1e-4, ge=0)
    """Coefficient of the weight decay."""
    excluded_roles: list[Role] = Field(default=["bias", "gain", "shift"])
    """Roles of the variables without weight decay (and, for LARS, without its ratio): biases of layers, gains and
    shifts of normalisation layers; `kernel` stands for every other variable."""

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the constructor: not the schedule's keys, nor the roles."""
        return self.model_dump(exclude={"name", "learning_rate_per_256", "scaling", "excluded_roles"})


class LARSConfig(OptimizerBase):
    """Layer-wise adaptive rates (You et al. 2017); weight decay is inside the gradient (L2)."""

    name: Literal["lars"] = "lars"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the momentum buffer."""
    nesterov: bool = True
    """Whether to look one momentum step ahead."""
    trust_coefficient: float = Field(default=0.001, gt=0)
    """The ratio of a layer's update to its weights at learning rate 1."""


class SGDConfig(OptimizerBase):
    """Momentum SGD; weight decay is beside the gradient (decoupled)."""

    name: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the momentum buffer."""
    nesterov: bool = True
    """Whether to look one momentum step ahead."""


class OneBitAdamConfig(OptimizerBase):
    """1-bit Adam (Tang et al. 2021); with exchange.codec=onebit_adam. Weight decay is decoupled."""

    name: Literal["onebit_adam"] = "onebit_adam"
    learning_rate_per_256: float = Field(default=0.001, gt=0)
    """Peak learning rate for a global batch of 256."""
    beta_1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment, the codec's too."""
    beta_2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps of plain Adam; the same as exchange.warmup_steps, and at least 1."""


OptimizerConfig = Annotated[LARSConfig | SGDConfig | OneBitAdamConfig, Field(discriminator="name")]

OPTIMIZER_NAMES = member_names(OptimizerConfig)
