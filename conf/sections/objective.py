"""The settings of the loss that training minimises, and of additional metrics."""

from typing import Annotated, Literal

from pydantic import Field

from conf.sections.imports import Imported
from conf.sections.section import Member


class CrossEntropyConfig(Member):
    """Cross-entropy of the dataset's task, with `training.label_smoothing` and `training.class_weights`."""

    name: Literal["cross_entropy"] = "cross_entropy"


class ImportedLossConfig(Imported):
    """Your own function, or one of Keras, from targets and logits to one loss per sample."""

    name: Literal["import"] = "import"


LossConfig = Annotated[CrossEntropyConfig | ImportedLossConfig, Field(discriminator="name")]


class MetricConfig(Imported):
    """A function from targets and probabilities to a number, as in scikit-learn; higher is better."""

    name: Literal["import"] = "import"
