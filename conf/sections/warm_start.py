"""The settings of a training that starts with the weights of an earlier one."""

from typing import Annotated

from pydantic import Field, model_validator

from conf.sections.section import Section


class WarmStartConfig(Section):
    """Weights of an earlier training as the start of this one."""

    source: str | None = Field(default=None, min_length=1)
    """Logged model (`runs:/...`, `models:/...`), checkpoint (`.npz`) or Keras file (`.keras`); null: new weights.
    Variables are taken by name and shape, bands by name. If the classes differ, the head starts with new weights."""
    frozen_layers: list[str] = Field(default=[])
    """Names of layers, with `*` and `?`, that keep the weights of the source."""
    rate_factors: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Factors of the learning rate by names with `*` and `?`, of layers, such as {"stage*": 0.1}, or of their
    variables, such as {"*/beta": 64}. If several names fit a variable, the last one counts; if none fits, the factor is
    1."""

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
        """Whether the source is a model in MLflow, not a file."""
        return (self.source or "").startswith(("runs:/", "models:/"))
