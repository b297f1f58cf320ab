"""Questions about runs: their status, tags and pages, and lists of them."""

import os
from dataclasses import dataclass
from typing import Literal

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run

from pipelines.machine.console import escape
from pipelines.storage.locations import redacted
from pipelines.tracking.store import databricks
from pipelines.tracking.store.experiments import name_in_store
from pipelines.tracking.store.store import (
    TrackedRun,
    is_new,
    readable_errors,
    runs_client,
    short_waits,
    show_command,
    tracking_uri,
)

RUNS_OF_A_PAGE = 100
"""Number of runs in one request to a server."""


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that failed, was killed, or still has the status running."""

    run_id: str
    name: str
    status: str


def has_run(run: TrackedRun) -> bool:
    """Return whether the store has a run that is not deleted, by itself or with its experiment.

    Raises:
        RuntimeError: The tracking server cannot be reached.
    """
    try:
        return str(_stored(run).info.lifecycle_stage) == LifecycleStage.ACTIVE
    except ValueError:
        return False


def is_finished(run_id: str) -> bool:
    """Return whether a run finished without an error, which includes logging its model.

    Raises:
        ValueError: The store has no such run.
        TrackingError: The store does not answer.
    """
    return str(_stored(TrackedRun(tracking_uri(), run_id)).info.status) == "FINISHED"


def tags(run: TrackedRun) -> dict[str, str]:
    """Return the current tags of a run.

    Raises:
        TrackingError: The store does not answer.
    """
    return dict(_stored(run).data.tags)


def _stored(run: TrackedRun) -> Run:
    """Return what the store knows of a run; raise ValueError if it has none, and TrackingError without an answer."""
    with readable_errors(run.uri), short_waits():
        return runs_client(run.uri).get_run(run.run_id)


def unfinished_runs(experiment: str) -> list[UnfinishedRun]:
    """Return the unfinished runs of an experiment, the newest first; none if there is no experiment.

    Raises:
        TrackingError: The store does not answer.
    """
    return [
        UnfinishedRun(run.info.run_id, run.info.run_name, run.info.status)
        for run in newest_runs(experiment, "attributes.status != 'FINISHED'")
    ]


def newest_runs(experiment: str, filter_text: str) -> list[Run]:
    """Return the runs of an experiment that match MLflow's filter, the newest first; none without the experiment.

    Raises:
        TrackingError: The store does not answer.
    """
    uri = tracking_uri()
    if is_new(uri):
        return []
    with readable_errors(uri), short_waits():
        client = runs_client(uri)
        found = client.get_experiment_by_name(name_in_store(uri, experiment))
        return [] if found is None else search_runs(client, found.experiment_id, filter_text, order="DESC")


def search_runs(
    client: MlflowClient, experiment_id: str, filter_text: str, *, order: Literal["ASC", "DESC"]
) -> list[Run]:
    """Return all runs of an experiment that match MLflow's filter, sorted by start time.

    Each request asks for one page: a page of a thousand runs takes a server longer than our time limit.
    """
    runs: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs(
            [experiment_id],
            filter_text,
            order_by=[f"attributes.start_time {order}"],
            max_results=RUNS_OF_A_PAGE,
            page_token=token,
        )
        runs += page
        token = page.token
        if not token:
            return runs


def page_of(run: TrackedRun) -> str | None:
    """Return the address of a run's page; None if the store has no pages or does not answer."""
    host = os.environ.get("DATABRICKS_HOST") if databricks.is_databricks(run.uri) else None
    if host is None and not run.uri.startswith(("http://", "https://")):
        return None
    try:
        experiment = _stored(run).info.experiment_id
    except Exception:  # same as in `runs.end_run`
        return None
    if host is not None:
        return f"{host.rstrip('/')}/ml/experiments/{experiment}/runs/{run.run_id}"
    # MLflow 3.17 shows every experiment as GenAI in a new browser, regardless of the kind of an experiment (`runs.py`).
    view = "workflowType=machine_learning"
    return f"{redacted(run.uri).rstrip('/')}/#/experiments/{experiment}/runs/{run.run_id}?{view}"


def link_to(run: TrackedRun) -> str:
    """Return HTML with a link to a run's page, or with the command that shows the run."""
    page = page_of(run)
    if page is None:
        return f"{run.run_id} <code>{escape(show_command(run))}</code>"
    return f'<a href="{escape(page)}" target="_blank">{run.run_id}</a>'
