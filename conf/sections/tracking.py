"""The settings of MLflow's records."""

import re

from pydantic import Field, field_validator

from conf.sections.section import Section

# Those that MLflow refuses in a name, and those that end a text in its filters.
_NOT_IN_A_NAME = re.compile(r"""[/:'"`]""")


class TrackingConfig(Section):
    """MLflow; the store is MLFLOW_TRACKING_URI, or sqlite under `mlruns/`."""

    experiment: str | None = Field(default=None, min_length=1)
    """Experiment that the run belongs to, created where it does not exist; null: the active one, of
    mlflow.set_experiment, MLFLOW_EXPERIMENT_NAME or a notebook on Databricks, else groundswell."""
    run_name: str | None = None
    """Name of the run; null: network, optimizer, global batch, codec and workers, such as r50-lars-g512-onebit-4w."""
    registered_model: str | None = Field(default=None, min_length=1)
    """Name under which the logged model is registered, `catalog.schema.model` in Unity Catalog; null: it is not."""
    promote_metric: str = Field(default="val/f1_macro", min_length=1)
    """Metric of validation that compares versions: those that end in loss are better when lower."""
    promote_margin: float = Field(default=0.0, ge=0)
    """Smallest difference by which a version must be better than the one with the alias champion to take it; else it
    becomes the challenger. So does every version that was validated on another dataset than the champion, which a
    repair of the dataset may have made another one: move the alias in MLflow then."""
    offline: bool = False
    """Whether training does without MLflow: what it records stays beside the checkpoints until `groundswell sync`
    writes it. The run's identifier is MLflow's from then on."""
    target: float | None = None
    """Value of the metric of training.selection.metric (null: val/f1_micro or val/top_1) that is worth reaching: the
    run's summary has samples and seconds to it; null: none."""
    system_seconds: float | None = Field(default=10.0, gt=0)
    """Time between samples of each rank's processor, memory, disk, network and GPU; null: none."""

    @field_validator("registered_model")
    @classmethod
    def _can_be_registered(cls, name: str | None) -> str | None:
        if name is not None and (found := _NOT_IN_A_NAME.search(name)):
            raise ValueError(
                f"tracking.registered_model={name}: a name in MLflow's registry has no {found[0]}, "
                "expected one such as resnet50 or catalog.schema.model"
            )
        return name
