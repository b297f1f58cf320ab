"""The settings of every optimizer, by name; their defaults are stated here only."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from conf.sections.section import NamedSection

Role = Literal["kernel", "bias", "gain", "shift"]


class OptimizerBase(NamedSection):
    """The settings that all optimizers share: the peak learning rate, and the variables without weight decay."""

    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate, independent of the global batch; null: it follows from `learning_rate_per_256`."""
    learning_rate_per_256: float | None = Field(default=0.1, gt=0)
    """Peak learning rate for a global batch of 256; null if `learning_rate` is given."""
    scaling: Literal["linear", "sqrt"] = "sqrt"
    """How the peak depends on the global batch size, with `learning_rate_per_256`; the published rates of LARS grow
    about as the square root."""
    weight_decay: float = Field(default=1e-4, ge=0)
    """Coefficient of the weight decay."""
    excluded_roles: list[Role] = Field(default=["bias", "gain", "shift"])
    """Roles of the variables without weight decay: biases of layers, gains and shifts of normalisation layers;
    `kernel` stands for every other variable."""

    @model_validator(mode="before")
    @classmethod
    def _absolute_rate_replaces_the_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("learning_rate") is not None:
            return {"learning_rate_per_256": None, **values}
        return values

    @model_validator(mode="after")
    def _one_rate(self) -> "OptimizerBase":
        if (self.learning_rate is None) == (self.learning_rate_per_256 is None):
            raise ValueError(
                f"optimizer.learning_rate={self.learning_rate} and optimizer.learning_rate_per_256="
                f"{self.learning_rate_per_256}: exactly one of them is a number, set the other one to null"
            )
        return self

    @property
    def uses_excluded_roles(self) -> bool:
        """Whether any variable is treated by `excluded_roles`."""
        return self.weight_decay > 0

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the constructor, without the schedule's keys and the roles."""
        return self.model_dump(
            exclude={"name", "learning_rate", "learning_rate_per_256", "scaling", "excluded_roles", "unadapted_roles"}
        )

    def roles(self) -> dict[str, list[Role]]:
        """Return the keyword arguments that are lists of variables, as the roles of these variables."""
        return {"excluded": self.excluded_roles}


class LayerwiseConfig(OptimizerBase):
    """An optimizer with a ratio of norms for each variable."""

    unadapted_roles: list[Role] | None = None
    """Roles of the variables without the ratio of norms, which get the full learning rate; null: `excluded_roles`."""

    @property
    def uses_excluded_roles(self) -> bool:
        """Whether any variable is treated by `excluded_roles`: these may also be the variables without the ratio."""
        return self.unadapted_roles is None or super().uses_excluded_roles

    def roles(self) -> dict[str, list[Role]]:
        """Return the keyword arguments that are lists of variables, as the roles of these variables."""
        unadapted = self.excluded_roles if self.unadapted_roles is None else self.unadapted_roles
        return {**super().roles(), "unadapted": unadapted}


class MomentumOptimizer(OptimizerBase):
    """The settings of optimizers with a momentum buffer."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the momentum buffer."""
    nesterov: bool = True
    """Whether to use Nesterov momentum, which looks one momentum step ahead."""


class MomentsOptimizer(OptimizerBase):
    """The settings of Adam and its relatives."""

    learning_rate_per_256: float | None = Field(default=0.001, gt=0)
    """Peak learning rate for a global batch of 256; null if `learning_rate` is given."""
    beta_1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment, with onebit_adam also for the codec."""
    beta_2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""


class LARSConfig(MomentumOptimizer, LayerwiseConfig):
    """Layer-wise adaptive rates (You et al. 2017); weight decay is inside the gradient (L2)."""

    name: Literal["lars"] = "lars"
    learning_rate_per_256: float | None = Field(default=2.9, gt=0)
    """Peak learning rate for a global batch of 256, extrapolated by the law of the published rates; null if
    `learning_rate` is given."""
    trust_coefficient: float = Field(default=0.001, gt=0)
    """The ratio of a layer's update to its weights at learning rate 1."""
    variant: Literal["mlperf", "outside", "larc", "tensorflow_models"] = "mlperf"
    """Published variant. `mlperf`: the learning rate is inside the momentum buffer; `outside`: outside the buffer, as
    in momentum correction (Goyal et al. 2017); `larc`: the smaller of learning rate and ratio; `tensorflow_models`: the
    ratio divides by the norm of the sum of gradient and decay."""
    epsilon: float = Field(default=0.0, ge=0)
    """Added to the denominator of the ratio."""

    @property
    def adapted_roles(self) -> set[Role]:
        """Roles of the variables with the ratio of norms."""
        return {*get_args(Role)} - {*self.roles()["unadapted"]}


class LAMBConfig(MomentsOptimizer, LayerwiseConfig):
    """LAMB (You et al. 2020): Adam with a ratio of norms; weight decay is inside the ratio."""

    name: Literal["lamb"] = "lamb"
    learning_rate_per_256: float | None = Field(default=0.0035, gt=0)
    """Peak learning rate for a global batch of 256; null if `learning_rate` is given."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Coefficient of the weight decay."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the root of the second moment."""


class AdamWConfig(MomentsOptimizer):
    """AdamW (Loshchilov and Hutter 2019); weight decay is separate from the gradient (decoupled)."""

    name: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.01, ge=0)
    """Coefficient of the weight decay."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""


class AdagradConfig(OptimizerBase):
    """Adagrad (Duchi et al. 2011), for late gradients; weight decay is separate from the gradient (decoupled)."""

    name: Literal["adagrad"] = "adagrad"
    learning_rate_per_256: float | None = Field(default=0.01, gt=0)
    """Peak learning rate for a global batch of 256; null if `learning_rate` is given."""
    initial_accumulator_value: float = Field(default=0.1, ge=0)
    """Initial sum of squared gradients."""
    epsilon: float = Field(default=1e-7, gt=0)
    """Added to the sum of squared gradients."""


class SGDConfig(MomentumOptimizer):
    """Momentum SGD; weight decay is separate from the gradient (decoupled)."""

    name: Literal["sgd"] = "sgd"
    scaling: Literal["linear", "sqrt"] = "linear"
    """How the peak depends on the global batch size, with `learning_rate_per_256`."""


class OneBitAdamConfig(MomentsOptimizer):
    """1-bit Adam (Tang et al. 2021); with exchange.codec=onebit_adam. Weight decay is decoupled."""

    name: Literal["onebit_adam"] = "onebit_adam"
    scaling: Literal["linear", "sqrt"] = "linear"
    """How the peak depends on the global batch size, with `learning_rate_per_256`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps with plain Adam; equal to exchange.warmup_steps, and at least 1."""


OptimizerConfig = Annotated[
    LARSConfig | LAMBConfig | AdamWConfig | AdagradConfig | SGDConfig | OneBitAdamConfig, Field(discriminator="name")
]
