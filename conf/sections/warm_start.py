"""How a training begins with the weights of an earlier one."""

from typing import Annotated

from pydantic import Field, model_validator

from conf.sections.section import Section


class WarmStartConfig(Section):
    """Weights of an earlier training as the start of this one."""

    source: str | None = Field(default=None, min_length=1)
    """Logged model (`runs:/...`, `models:/...`), checkpoint (`.npz`) or Keras file (`.keras`); null: new weights. Taken
    by name and shape; bands by name; the head starts anew where the classes are others."""
    frozen_layers: list[str] = Field(default=[])
    """Names of layers, with `*` and `?`, that keep the weights of the source."""
    rate_factors: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Factors of the learning rate by names with `*` and `?`, of layers, such as {"stage*": 0.1}, or of variables in
    them, such as {"*/beta": 64}; of several names that fit a variable the last one counts, and 1 where none does."""

    @model_validator(mode="after")
    def _only_weights_that_were_trained_are_frozen(self) -> "WarmStartConfig":
        if self.frozen_layers and self.source is None:
            raise ValueError(
                f"warm_start.frozen_layers={self.frozen_layers} would keep weights that nobody trained: set "
                "warm_start.source"
            )
        return self

    @property
    def is_logged(self) -> bool:
        """Whether the source is a model in MLflow, and not a file."""
        return (self.source or "").startswith(("runs:/", "models:/"))
