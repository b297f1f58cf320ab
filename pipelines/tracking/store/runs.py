"""Functions with which the driver creates, continues and ends runs."""

import getpass
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, LifecycleStage, Param, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from pipelines.storage.locations import redacted
from pipelines.tracking.journal.guard import guarded
from pipelines.tracking.journal.local_run import DatasetFacts, LocalRun
from pipelines.tracking.store.experiments import name_in_store
from pipelines.tracking.store.queries import has_run
from pipelines.tracking.store.store import (
    TrackedRun,
    TrackingError,
    check_writable,
    is_new,
    readable_errors,
    reason_of,
    runs_client,
    short_waits,
    sqlite_file,
    tracking_uri,
)

_PARAMS_PER_BATCH = 100
_MADE_OFFLINE_AS = "groundswell.offline_run"
"""Tag of a run that was created without the store: its identifier at that time."""
_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment that makes MLflow's page show runs and charts of trainings without asking for a kind."""
_log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]


def check_store(experiment: str | None = None) -> str:
    """Ask the store for an experiment without writing, and return which store it is.

    Args:
        experiment: Name of the experiment of a new run; None: there will be no new run.

    Raises:
        ValueError: MLflow cannot use the store, or the experiment was deleted.
        RuntimeError: The tracking server does not answer, or the store's folder cannot be written.
    """
    uri = tracking_uri()
    check_writable(uri)
    if is_new(uri):
        return f"{redacted(uri)}, which the first run creates"
    with readable_errors(uri), short_waits():
        client = runs_client(uri)
        if experiment is None:
            client.search_experiments(max_results=1)
        else:
            _existing_experiment(client, uri, name_in_store(uri, experiment))
    return f"{redacted(uri)} answers"


def start_run(
    experiment: str,
    name: str | None,
    parameters: Mapping[str, Any],
    tags: Mapping[str, str],
    *,
    dataset: DatasetFacts | None = None,
    context: str = "training",
) -> TrackedRun:
    """Create a run, and also its experiment if that is new.

    Args:
        experiment: Name of the experiment.
        name: Name of the run; None: MLflow chooses one.
        parameters: Settings of the run.
        tags: Tags of the run.
        dataset: Dataset of the run.
        context: Purpose of the dataset.

    Raises:
        ValueError: The store cannot be used or written.
        TrackingError: The tracking server cannot be reached.
    """
    uri = tracking_uri()
    _make_folder(uri)
    with readable_errors(uri), short_waits():
        return _create_run(uri, _experiment_id(uri, experiment), name, tags, parameters, dataset, context)


def store_run(local: LocalRun) -> TrackedRun:
    """Create a run in the store that was made without it, or return the one of an interrupted earlier call.

    Raises:
        ValueError, TrackingError: The same as in `start_run`.
    """
    uri, made = tracking_uri(), local.description
    _make_folder(uri)
    with readable_errors(uri), short_waits():
        client = runs_client(uri)
        experiment = _experiment_id(uri, made.experiment)
        existing = client.search_runs([experiment], f"tags.`{_MADE_OFFLINE_AS}` = '{local.run_id}'", max_results=1)
        tags = {**_with_user(made.tags), _MADE_OFFLINE_AS: local.run_id}
        run = next(iter(existing), None) or client.create_run(
            experiment, start_time=local.started, run_name=made.name, tags=tags
        )
        _describe(client, run.info.run_id, made.parameters, made.dataset, "training")
    return TrackedRun(uri, run.info.run_id)


def _create_run(
    uri: str,
    experiment: str,
    name: str | None,
    tags: Mapping[str, str],
    parameters: Mapping[str, Any],
    dataset: DatasetFacts | None,
    context: str,
) -> TrackedRun:
    """Create a run; one that the store does not accept completely is set to failed."""
    client = runs_client(uri)
    run_id: str = client.create_run(experiment, run_name=name, tags=_with_user(tags)).info.run_id
    try:
        _describe(client, run_id, parameters, dataset, context)
    except BaseException:
        with suppress(Exception):  # the store may not answer any more
            client.set_terminated(run_id, "FAILED")
        raise
    return TrackedRun(uri, run_id)


def _describe(
    client: MlflowClient, run_id: str, parameters: Mapping[str, Any], dataset: DatasetFacts | None, context: str
) -> None:
    values = [Param(key, redacted(str(value))) for key, value in parameters.items()]
    for start in range(0, len(values), _PARAMS_PER_BATCH):
        client.log_batch(run_id, params=values[start : start + _PARAMS_PER_BATCH])
    if dataset is not None:
        source = dataset.source
        # MLflow's name for the location: the scheme of a URL, or `local`.
        source_type = source.partition("://")[0].split('"')[-1] if "://" in source else "local"
        entity = Dataset(dataset.name, dataset.digest, source_type, source, dataset.schema, dataset.profile)
        client.log_inputs(run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", context)])])


def _with_user(tags: Mapping[str, str]) -> dict[str, str]:
    try:
        return {"mlflow.user": getpass.getuser(), **tags}
    except (KeyError, OSError):  # a container's user may have no name
        return dict(tags)


def start_child_run(
    parent: TrackedRun,
    name: str,
    parameters: Mapping[str, Any],
    tags: Mapping[str, str],
    *,
    dataset: DatasetFacts | None = None,
    context: str = "training",
) -> TrackedRun:
    """Create a child of a run, in the same experiment; the arguments are those of `start_run`.

    Raises:
        ValueError: The store has no such parent.
        RuntimeError: The tracking server cannot be reached.
    """
    with readable_errors(parent.uri), short_waits():
        experiment = runs_client(parent.uri).get_run(parent.run_id).info.experiment_id
        tags = {**tags, MLFLOW_PARENT_RUN_ID: parent.run_id}
        return _create_run(parent.uri, experiment, name, tags, parameters, dataset, context)


def continue_run(run_id: str) -> TrackedRun:
    """Set an existing run to running again.

    Raises:
        ValueError: The store has no such run.
        RuntimeError: The tracking server cannot be reached.
    """
    uri = tracking_uri()
    with readable_errors(uri), short_waits():
        runs_client(uri).update_run(run_id, status="RUNNING")
    return TrackedRun(uri, run_id)


def is_known(run_id: str) -> bool:
    """Return whether the store has a run; see `has_run`. A new store is created.

    Raises:
        TrackingError: The store does not answer.
    """
    uri = tracking_uri()
    _make_folder(uri)
    return has_run(TrackedRun(uri, run_id))


def set_tags(run: TrackedRun, tags: Mapping[str, str]) -> None:
    """Set tags of a run immediately, without a journal.

    Raises:
        ValueError: The store has no such run.
        TrackingError: The store does not answer.
    """
    with readable_errors(run.uri), short_waits():
        runs_client(run.uri).log_batch(run.run_id, tags=[RunTag(*tag) for tag in tags.items()])


def end_run(run: TrackedRun, status: Status, ended: int | None = None) -> None:
    """Close a run.

    Args:
        run: The run.
        status: Final status.
        ended: Time of the end, in milliseconds since 1970; None: now.

    Raises:
        TrackingError: The store does not answer or refuses.
    """
    try:
        with readable_errors(run.uri), short_waits():
            runs_client(run.uri).set_terminated(run.run_id, status, ended)
    except Exception as error:  # MLflow's HTTP and storage libraries each have their own errors too
        raise TrackingError(reason_of(error)) from None


def end_failed_run(run: TrackedRun, status: Status, *, away: str = "") -> bool:
    """Close a run after a failure; a store that does not answer causes only a warning, to keep the failure visible.

    Args:
        run: The run.
        status: Final status.
        away: Reason why the store did not answer a moment ago; then it is not asked again.

    Returns:
        Whether the store has accepted the end.
    """
    try:
        if away:
            raise TrackingError(away)
        end_run(run, status)
    except TrackingError as error:
        _log.warning("MLflow still shows run %s as running, until `groundswell sync`: %s", run.run_id, error)
        return False
    return True


@contextmanager
def ended(run: TrackedRun) -> Iterator[None]:
    """End a run with the status of the block: finished, failed or killed. If this process is killed, a guard does it.

    If the store does not answer at the end, there is a warning, because the block has done its work.
    """
    with guarded(run):
        try:
            yield
        except BaseException as error:
            _end_or_warn(run, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        _end_or_warn(run, "FINISHED")


def _end_or_warn(run: TrackedRun, status: Status) -> None:
    try:
        end_run(run, status)
    except TrackingError as error:
        _log.warning("MLflow still shows run %s as running, and it is %s: %s", run.run_id, status.lower(), error)


def _make_folder(uri: str) -> None:
    check_writable(uri)
    file = sqlite_file(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)


def _existing_experiment(client: MlflowClient, uri: str, name: str) -> Experiment | None:
    """Return the experiment whose name in the store belongs to `name`; None: there is none yet."""
    found = client.get_experiment_by_name(name)
    if found is not None and found.lifecycle_stage != LifecycleStage.ACTIVE:
        raise ValueError(
            f"tracking.experiment={name} is deleted in {redacted(uri)}: choose another name, or restore it with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return found


def _experiment_id(uri: str, name: str) -> str:
    client, name = runs_client(uri), name_in_store(uri, name)
    experiment = _existing_experiment(client, uri, name)
    if experiment is not None:
        for key, value in _KIND.items():
            if key not in experiment.tags:
                client.set_experiment_tag(experiment.experiment_id, key, value)
        return str(experiment.experiment_id)
    file = sqlite_file(uri)
    # Artifacts are beside the database. MLflow's own place for them is `mlruns` in the working directory.
    artifacts = None if file is None or file.parent == Path.cwd() else (file.parent / "artifacts").as_uri()
    return str(client.create_experiment(name, artifact_location=artifacts, tags=_KIND))
