"""The settings of MLflow's records."""

import re

from pydantic import Field, field_validator

from conf.sections.section import Section

# Characters that MLflow refuses in a name, or that end a text in its filters.
_NOT_IN_A_NAME = re.compile(r"""[/:'"`]""")


class TrackingConfig(Section):
    """The settings of MLflow; the store is MLFLOW_TRACKING_URI, or sqlite under `mlruns/`."""

    experiment: str | None = Field(default=None, min_length=1)
    """Experiment of the run, created if it does not exist. Null: the active one (mlflow.set_experiment,
    MLFLOW_EXPERIMENT_NAME or a notebook on Databricks), else groundswell."""
    run_name: str | None = None
    """Name of the run; null: network, optimizer, global batch, codec and workers, such as r50-lars-g512-onebit-4w."""
    registered_model: str | None = Field(default=None, min_length=1)
    """Name under which the logged model is registered, `catalog.schema.model` in Unity Catalog; null: no
    registration."""
    promote_metric: str = Field(default="val/f1_macro", min_length=1)
    """Validation metric that compares versions; a metric whose name ends in loss is better when lower."""
    promote_margin: float = Field(default=0.0, ge=0)
    """Smallest improvement on the version with the alias champion with which a new version takes this alias; else it
    becomes the challenger. A version that was validated on another dataset than the champion also becomes the
    challenger. A repair may have made the dataset another one: move the alias in MLflow then."""
    offline: bool = False
    """Whether to train without MLflow: the records stay with the checkpoints until `groundswell sync` writes them to
    MLflow. From then on the run has MLflow's identifier."""
    target: float | None = None
    """Target for the metric training.selection.metric (null there: val/f1_micro or val/top_1): the run's summary has
    the samples and seconds to reach it. Null: no target."""
    system_seconds: float | None = Field(default=10.0, gt=0)
    """Time between samples of each rank's processor, memory, disk, network and GPU; null: no samples."""

    @field_validator("registered_model")
    @classmethod
    def _can_be_registered(cls, name: str | None) -> str | None:
        if name is not None and (found := _NOT_IN_A_NAME.search(name)):
            raise ValueError(
                f"tracking.registered_model={name}: a name in MLflow's registry has no {found[0]}, "
                "expected one such as resnet50 or catalog.schema.model"
            )
        return name
