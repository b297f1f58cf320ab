"""The settings of MLflow's records."""

from pydantic import Field

from conf.section import Section


class TrackingConfig(Section):
    """MLflow; the store is MLFLOW_TRACKING_URI, or sqlite under `mlruns/`."""

    experiment: str = Field(default="groundswell", min_length=1)
    """Experiment that the run belongs to; it is created where it does not exist."""
    run_name: str | None = None
    """Name of the run; null: MLflow invents one."""
    registered_model: str | None = None
    """Name under which the logged model is registered; null: it is not."""
