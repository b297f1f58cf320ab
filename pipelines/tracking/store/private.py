"""Facts without a public function in MLflow; only this module uses MLflow's private names."""

from mlflow.tracking import fluent
from mlflow.tracking._model_registry import utils
from mlflow.tracking._tracking_service import utils as service


def chosen_store() -> str | None:
    """Return the store's address that was set in this process; None: MLflow reads the environment."""
    return service._tracking_uri


def chosen_registry() -> str | None:
    """Return the registry's address that was set in this process; None: MLflow chooses it."""
    return utils._registry_uri


def chosen_experiment_id() -> str | None:
    """Return the experiment that was set in this process; None: none was set."""
    return fluent._active_experiment_id


def active_experiment_id() -> str | None:
    """Return the experiment to which `mlflow.start_run` would add a run, without creating a run."""
    return fluent._get_experiment_id()
