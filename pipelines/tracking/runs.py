"""Runs as the driver makes, continues, finds and ends them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient
from mlflow.entities import Param
from mlflow.exceptions import MlflowException

from pipelines.tracking.store import TrackedRun, readable_errors, reason_of, short_waits, tracking_uri

_PARAMS_PER_BATCH = 100
_log = logging.getLogger(__name__)


def start_run(experiment: str, name: str | None, parameters: Mapping[str, Any], tags: Mapping[str, str]) -> TrackedRun:
    """Create a run, and its experiment where it is new.

    Raises:
        RuntimeError: The tracking server cannot be reached.
    """
    uri = tracking_uri()
    _make_folder(uri)
    with readable_errors(uri), short_waits():
        client = MlflowClient(uri)
        run = client.create_run(_experiment_id(client, uri, experiment), run_name=name, tags=dict(tags))
        run_id: str = run.info.run_id
        values = [Param(key, str(value)) for key, value in parameters.items()]
        for start in range(0, len(values), _PARAMS_PER_BATCH):
            client.log_batch(run_id, params=values[start : start + _PARAMS_PER_BATCH])
    return TrackedRun(uri, run_id)


def continue_run(run_id: str) -> TrackedRun:
    """Set an existing run to running again.

    Raises:
        ValueError: The store has no such run.
        RuntimeError: The tracking server cannot be reached.
    """
    uri = tracking_uri()
    with readable_errors(uri), short_waits():
        MlflowClient(uri).update_run(run_id, status="RUNNING")
    return TrackedRun(uri, run_id)


def is_finished(run_id: str) -> bool:
    """Whether a run ended well, which it does after its model was logged.

    Raises:
        ValueError: The store has no such run.
        RuntimeError: The tracking server cannot be reached.
    """
    uri = tracking_uri()
    with readable_errors(uri), short_waits():
        return str(MlflowClient(uri).get_run(run_id).info.status) == "FINISHED"


def has_value(run: TrackedRun, metric: str, step: int) -> bool:
    """Whether a run has a value of a metric at a step; False if the store does not answer."""
    try:
        with short_waits():
            return any(value.step == step for value in MlflowClient(run.uri).get_metric_history(run.run_id, metric))
    except (MlflowException, OSError):  # requests' errors are OSErrors
        return False


def end_run(run: TrackedRun, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """Close a run."""
    try:
        with short_waits():
            MlflowClient(run.uri).set_terminated(run.run_id, status)
    except (MlflowException, OSError) as error:  # requests' errors are OSErrors
        _log.warning("MLflow did not take a write: %s", reason_of(error))


def _make_folder(uri: str) -> None:
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    local = Path(uri.removeprefix("sqlite:///")).parent / "artifacts" if uri.startswith("sqlite:///") else None
    # Beside the database: MLflow's own default would follow the working directory of whoever asks.
    return str(client.create_experiment(name, artifact_location=local.as_uri() if local else None))
