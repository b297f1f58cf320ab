"""The settings that choose the best epoch and the end of training."""

from typing import Literal

from pydantic import Field, model_validator

from conf.sections.section import Section


class SelectionConfig(Section):
    """Which epoch is the best one, and when training ends because no better one comes."""

    metric: str | None = None
    """Metric of validation that compares epochs, such as val/f1_micro or val_ema/loss: those that end in loss are
    better when lower, others when higher. The checkpoint of the best epoch is kept whatever its age. Null: epochs are
    not compared."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest difference by which an epoch must be better than the best one before to count as better."""
    patience: int | None = Field(default=None, gt=0)
    """Number of epochs in a row without a better one after which training ends; null: all epochs are trained."""
    model: Literal["best", "last"] = "best"
    """Epoch whose weights the logged model has."""

    @model_validator(mode="after")
    def _needs_a_metric(self) -> "SelectionConfig":
        for key in ("min_delta", "patience", "model"):
            if self.metric is None and getattr(self, key) != self.default(key):
                raise ValueError(
                    f"training.selection.{key}={getattr(self, key)} has no effect without training.selection.metric: "
                    "set it to a metric of validation, such as val/loss"
                )
        return self
