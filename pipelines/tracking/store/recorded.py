"""Functions that read the trainings of an experiment, with their curves."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Experiment, Run

from pipelines.machine.json_text import parse_json
from pipelines.storage.locations import redacted
from pipelines.storage.whole_files import os_errors_as
from pipelines.tracking.journal.writer import Point
from pipelines.tracking.store.experiments import name_in_store
from pipelines.tracking.store.queries import newest_runs, search_runs
from pipelines.tracking.store.store import (
    readable_errors,
    short_waits,
    sqlite_file,
    tracking_uri,
)

PARENT_TAG = "mlflow.parentRunId"
DIVERGED_TAG = "diverged"
"""Tag that says how a training diverged; empty if it was resumed later."""
CHANGED_PREFIX = "changed."
"""Prefix of a tag, before the name of a setting: its later values, each with its first step."""
NOT_SET = "not set"
"""Value in such a tag for a setting that the training had no longer."""
_NO_PARAMETER = ("None", "[]", "{}", NOT_SET)
"""Values in such a tag that are not stored as parameters."""
_NAMED_EXPERIMENTS = 12
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True)
class RecordedRun:
    """One training from the store."""

    run_id: str
    name: str
    status: str
    started: int
    """Milliseconds since 1970."""
    parameters: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]
    """Last value of each metric."""
    curves: dict[str, list[Point]]
    """The requested metrics by rising step; one point per step."""
    dataset: dict[str, Any] = field(default_factory=dict)
    """The dataset's counts, such as `classes`, and its `task`; empty if the store does not have them."""

    @property
    def later_values(self) -> dict[str, str]:
        """The later values of settings, by key: `0.5 from step 16, 0.1 from step 24`.

        A setting that was changed back before any step that counts is not included.
        """
        found = {}
        for tag, text in self.tags.items():
            key = tag.removeprefix(CHANGED_PREFIX)
            first = (self.parameters[key],) if key in self.parameters else _NO_PARAMETER
            is_as_before = any(re.fullmatch(rf"{re.escape(value)} from step \d+", text) for value in first)
            if tag.startswith(CHANGED_PREFIX) and not is_as_before:
                found[key] = text
        return found


@dataclass(frozen=True)
class TaggedRun:
    """A run that was found by a tag."""

    run_id: str
    status: str
    tags: dict[str, str]
    seconds: float
    """Seconds from the start to the end of the run; 0 while it runs."""


def recorded_trainings(
    experiment: str, filter_text: str, *, children: bool, groups: Sequence[str], metrics: Sequence[str]
) -> list[RecordedRun]:
    """Return the trainings of an experiment, the oldest first.

    Args:
        experiment: Name of the experiment.
        filter_text: MLflow's filter, such as `params."optimizer.name" = 'lars'`; empty: all.
        children: Whether runs with a parent, such as the cells of a grid, are included beside others. Where no other
            training matches, they are.
        groups: Groups of metrics whose curves are read, such as `val`.
        metrics: Further metrics whose curves are read.

    Raises:
        ValueError: There is no such store or experiment, the filter is not valid, or no training matches.
        TrackingError: The store does not answer.
    """
    uri = tracking_uri()
    with _readable_store(uri) as client:
        found = _experiment(client, name_in_store(uri, experiment), uri)
        with readable_errors(f"--filter {filter_text!r}" if filter_text else uri):
            runs = search_runs(client, found.experiment_id, filter_text, order="ASC")
        trainings = [run for run in runs if run.data.tags.get("mlflow.source.name") == "groundswell train"]
        if not trainings:
            fits = f" that fit --filter {filter_text!r}" if filter_text else ""
            none = f"none of the {len(runs)} runs of experiment {experiment!r}{fits} is a training"
            raise ValueError(none if runs else f"experiment {experiment!r} has no runs{fits}")
        chosen = [run for run in trainings if children or PARENT_TAG not in run.data.tags]
        return [_read(client, run, groups, metrics) for run in chosen or trainings]


def runs_with_tag(experiment: str, tag: str, value: str) -> list[TaggedRun]:
    """Return the runs of an experiment that have a tag, the newest first; none if there is no experiment.

    Raises:
        TrackingError: The store does not answer.
    """
    return [
        TaggedRun(
            run_id=str(run.info.run_id),
            status=str(run.info.status),
            tags=dict(run.data.tags),
            seconds=max(0, (run.info.end_time or 0) - (run.info.start_time or 0)) / 1000,
        )
        for run in newest_runs(experiment, f"tags.`{tag}` = '{value}'")
    ]


def recorded_training(run_id: str, *, groups: Sequence[str], metrics: Sequence[str]) -> RecordedRun:
    """Return one training; see `recorded_trainings`.

    Raises:
        ValueError: The store has no such run.
        TrackingError: The store does not answer.
    """
    with _readable_store(tracking_uri()) as client, readable_errors(f"run {run_id}"):
        return _read(client, client.get_run(run_id), groups, metrics)


@contextmanager
def _readable_store(uri: str) -> Iterator[MlflowClient]:
    """Yield a client; refuse a missing sqlite file, which MLflow would create, and one that cannot be read."""
    file, shown = sqlite_file(uri), redacted(uri)
    if file is not None:
        with os_errors_as(ValueError, f"{shown} cannot be read"):
            if not file.exists():
                raise ValueError(f"there are no runs: {shown} does not exist; is MLFLOW_TRACKING_URI right?")
            with file.open("rb") as opened:
                start = opened.read(len(_SQLITE))
        if start not in (b"", _SQLITE):  # MLflow would retry for an hour
            raise ValueError(f"{shown} is no sqlite database; is MLFLOW_TRACKING_URI right?")
    with short_waits(), readable_errors(uri):
        yield MlflowClient(uri)


def _experiment(client: MlflowClient, name: str, uri: str) -> Experiment:
    found = client.get_experiment_by_name(name)
    if found is not None and found.lifecycle_stage == "active":
        return found
    known = [experiment.name for experiment in client.search_experiments(max_results=_NAMED_EXPERIMENTS + 1)]
    more = ", ..." if len(known) > _NAMED_EXPERIMENTS else ""
    there = f"is deleted in {redacted(uri)}" if found is not None else f"is not in {redacted(uri)}"
    raise ValueError(f"experiment {name!r} {there}, which has: {', '.join(known[:_NAMED_EXPERIMENTS])}{more}")


def _read(client: MlflowClient, run: Run, groups: Sequence[str], metrics: Sequence[str]) -> RecordedRun:
    names = [name for name in run.data.metrics if name in metrics or name.partition("/")[0] in groups]
    # Users may log datasets too, with any text.
    fingerprint, inputs = (
        run.data.params.get("dataset_fingerprint", ""),
        run.inputs.dataset_inputs if run.inputs else [],
    )
    ours = [
        each.dataset.profile or "{}" for each in inputs if fingerprint and fingerprint.startswith(each.dataset.digest)
    ]
    return RecordedRun(
        run_id=str(run.info.run_id),
        name=str(run.info.run_name),
        status=str(run.info.status),
        started=int(run.info.start_time or 0),
        parameters=dict(run.data.params),
        tags=dict(run.data.tags),
        metrics=dict(run.data.metrics),
        curves={name: _curve(client, run.info.run_id, name) for name in names},
        dataset=parse_json(ours[0]) if ours else {},
    )


def _curve(client: MlflowClient, run_id: str, name: str) -> list[Point]:
    """Return the newest point of each step."""
    history = sorted(client.get_metric_history(run_id, name), key=lambda metric: (metric.step, metric.timestamp))
    return list({metric.step: Point(metric.step, metric.value, metric.timestamp) for metric in history}.values())
