"""Facts without a public function in MLflow; only this module uses MLflow's private names."""

from mlflow.tracking import fluent
from mlflow.tracking._model_registry import utils


def chosen_registry() -> str | None:
    """Return the registry's address that was set in this process; None: MLflow chooses it."""
    return utils._registry_uri


def chosen_experiment_id() -> str | None:
    """Return the experiment that was set in this process; None: none was set."""
    return fluent._active_experiment_id


def active_experiment_id() -> str | None:
    """Return the experiment to which `mlflow.start_run` would add a run, without creating a run."""
    return fluent._get_experiment_id()
