"""The settings that choose the best epoch and the end of training."""

from typing import Literal

from pydantic import Field, model_validator

from conf.sections.section import Section


class SelectionConfig(Section):
    """The choice of the best epoch, and the end of training if no better one follows."""

    metric: str | None = None
    """Validation metric that compares epochs, such as val/f1_micro or val_ema/loss. A metric whose name ends in loss is
    better when lower, others when higher. The checkpoint of the best epoch is always kept. Null: epochs are not
    compared."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest improvement on the earlier best epoch that counts as better."""
    patience: int | None = Field(default=None, gt=0)
    """Number of consecutive epochs without a better one after which training ends; null: all epochs are trained."""
    model: Literal["best", "last"] = "best"
    """Epoch that provides the weights of the logged model."""

    @model_validator(mode="after")
    def _needs_a_metric(self) -> "SelectionConfig":
        for key in ("min_delta", "patience", "model"):
            if self.metric is None and getattr(self, key) != self.default(key):
                raise ValueError(
                    f"training.selection.{key}={getattr(self, key)} has no effect without training.selection.metric: "
                    "set it to a metric of validation, such as val/loss"
                )
        return self
