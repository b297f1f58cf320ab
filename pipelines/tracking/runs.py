"""Runs as the driver makes, continues, finds and ends them."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient
from mlflow.entities import Param
from mlflow.exceptions import MlflowException

from pipelines.locations import redacted
from pipelines.tracking.store import TrackedRun, TrackingError, readable_errors, reason_of, short_waits, tracking_uri

_PARAMS_PER_BATCH = 100
_log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that failed, was killed, or is still shown as running."""

    run_id: str
    name: str
    status: str


def check_store() -> str:
    """Ask the store for an experiment, and say which store it is; nothing is written.

    Raises:
        ValueError: MLflow cannot use the store.
        RuntimeError: The tracking server does not answer, or the store's folder cannot be written.
    """
    uri = tracking_uri()
    file = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None
    if file is not None and not file.exists():
        folder = next(parent for parent in file.parents if parent.exists())
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RuntimeError(f"{redacted(uri)} does not exist, and {folder} cannot be written")
        return f"{redacted(uri)}, which the first run creates"
    with readable_errors(uri), short_waits():
        MlflowClient(uri).search_experiments(max_results=1)
    return f"{redacted(uri)} answers"


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
        TrackingError: The store does not answer.
    """
    uri = tracking_uri()
    with readable_errors(uri), short_waits():
        return str(MlflowClient(uri).get_run(run_id).info.status) == "FINISHED"


def parameters(run: TrackedRun) -> dict[str, str]:
    """Return the parameters with which a run was made.

    Raises:
        TrackingError: The store does not answer.
    """
    with readable_errors(run.uri), short_waits():
        return dict(MlflowClient(run.uri).get_run(run.run_id).data.params)


def unfinished_runs(experiment: str) -> list[UnfinishedRun]:
    """Return the runs of an experiment that are not finished, the newest first; none where there is no experiment.

    Raises:
        TrackingError: The store does not answer.
    """
    uri = tracking_uri()
    with readable_errors(uri), short_waits():
        client = MlflowClient(uri)
        found = client.get_experiment_by_name(experiment)
        if found is None:
            return []
        runs = client.search_runs(
            [found.experiment_id], "attributes.status != 'FINISHED'", order_by=["attributes.start_time DESC"]
        )
        return [UnfinishedRun(run.info.run_id, run.info.run_name, run.info.status) for run in runs]


def end_run(run: TrackedRun, status: Status) -> None:
    """Close a run.

    Raises:
        TrackingError: The store does not answer or refuses.
    """
    try:
        with short_waits():
            MlflowClient(run.uri).set_terminated(run.run_id, status)
    except (MlflowException, OSError) as error:  # requests' errors are OSErrors
        raise TrackingError(reason_of(error)) from None


def end_failed_run(run: TrackedRun, status: Status) -> None:
    """Close a run after a failure, which a store that does not answer must not hide: that is a warning."""
    try:
        end_run(run, status)
    except TrackingError as error:
        _log.warning("MLflow still shows run %s as running: %s", run.run_id, error)


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
