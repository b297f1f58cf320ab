"""The settings of MLflow's records."""

from pydantic import Field

from conf.section import Section


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
    promote_margin: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Smallest difference by which a version must be better than the one with the alias champion to take it; else it
    becomes the challenger."""
    offline: bool = False
    """Whether training does without MLflow: what it records stays beside the checkpoints until `groundswell sync`
    writes it. The run's identifier is MLflow's from then on."""
    target: float | None = None
    """Value of the metric of training.selection.metric (null: val/f1_micro or val/top_1) that is worth reaching: the
    run's summary has samples and seconds to it; null: none."""
    system_seconds: float | None = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Time between samples of each rank's processor, memory, disk, network and GPU; null: none."""
