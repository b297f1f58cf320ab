"""The experiment of a run, and its name in the store."""

import os
from pathlib import PurePosixPath

import mlflow

from pipelines.tracking.store import databricks
from pipelines.tracking.store.private import active_experiment_id, chosen_experiment_id
from pipelines.tracking.store.store import is_new, readable_errors, short_waits, tracking_uri


def chosen_experiment(configured: str | None, *, offline: bool = False) -> str:
    """Return the name of the experiment of new runs.

    This is the configured one, else the active one in MLflow, else `groundswell`.

    Args:
        configured: `tracking.experiment`.
        offline: Whether the store must not be asked; then the active experiment is not known.

    Raises:
        ValueError, TrackingError: The same as in `active_experiment`.
    """
    if configured is not None:
        return configured
    return (None if offline else active_experiment()) or "groundswell"


def active_experiment() -> str | None:
    """Return the name of the experiment to which MLflow's own `start_run` would add a run; None: none was chosen.

    `mlflow.set_experiment`, MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID chooses it. A notebook on Databricks has
    its own experiment.

    Raises:
        ValueError: The store does not know the chosen experiment.
        TrackingError: The store does not answer.
    """
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if name and chosen_experiment_id() is None:
        return name  # MLflow would create it immediately, in its own default store
    with readable_errors("MLflow's active experiment"), short_waits():
        identifier = active_experiment_id()
        if identifier in (None, "0"):  # `0` is MLflow's own experiment with the name Default
            return None
        return str(mlflow.MlflowClient(mlflow.get_tracking_uri()).get_experiment(identifier).name)


def name_in_store(uri: str, name: str) -> str:
    """Return the name of an experiment in a store: Databricks has only absolute names.

    A relative name becomes a name in the folder of the active experiment.

    Raises:
        ValueError: The name is relative, and no experiment is active; also in the cases of `active_experiment`.
        TrackingError: The same as in `active_experiment`.
    """
    if not databricks.is_databricks(uri) or name.startswith("/"):
        return name
    active = active_experiment()
    if active is None or not active.startswith("/"):
        raise ValueError(
            f"tracking.experiment={name}: Databricks takes absolute names, such as /Users/<your name>/{name}"
        )
    return str(PurePosixPath(active).parent / name)


def experiment_of(run_id: str) -> str | None:
    """Return the current name of a run's experiment; None if the store has no such run, or if it is deleted.

    Raises:
        TrackingError: The store does not answer.
    """
    uri = tracking_uri()
    if is_new(uri):
        return None
    try:
        with readable_errors(uri), short_waits():
            client = mlflow.MlflowClient(uri)
            run = client.get_run(run_id).info
            return str(client.get_experiment(run.experiment_id).name) if run.lifecycle_stage == "active" else None
    except ValueError:
        return None
