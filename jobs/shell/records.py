"""Runs of MLflow that jobs other than trainings write."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from conf.schema import RunConfig
from jobs.shell.command import Result
from models.metrics import ClassScores
from pipelines.dataset.format.manifest import Manifest
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store import revision
from pipelines.tracking.store.experiments import chosen_experiment
from pipelines.tracking.store.queries import has_run
from pipelines.tracking.store.runs import start_child_run, start_run
from pipelines.tracking.store.served import ServedModel
from pipelines.tracking.store.store import TrackedRun, TrackingError, tracking_uri
from pipelines.training.setup.description import dataset_facts


def tags_of(verb: str) -> dict[str, str]:
    """Return the tags of every run that a verb starts."""
    return {"mlflow.source.name": f"groundswell {verb}", "mlflow.source.type": "JOB", **revision.tags()}


def write_run(run: TrackedRun, write: Callable[[RunWriter], None], **options: Any) -> str:
    """Write to a run, and return the reason why MLflow has not taken everything; empty: it has.

    Args:
        run: The run.
        write: Function that writes.
        options: Options of the writer.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(RunWriter(run, Path(folder, "journal"), **options)) as writer,
    ):
        write(writer)
        return writer.drain()


class ScoresOfModel(NamedTuple):
    """The scores of a model, which an error names if the store does not accept them."""

    metrics: Mapping[str, float]
    remedy: str
    """A text that says how to record them later."""

    def not_taken(self, reason: str) -> TrackingError:
        """Return the error that the store did not accept the scores, which are in the message."""
        scores = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        return TrackingError(f"MLflow did not take the scores ({reason}): {scores}. {self.remedy}")

    def write(self, run: TrackedRun, write: Callable[[RunWriter], None], **options: Any) -> None:
        """Write them and what belongs to them to a run; for the arguments see `write_run`.

        Raises:
            TrackingError: The store does not accept them.
        """
        if reason := write_run(run, write, **options):
            raise self.not_taken(reason)


def write_per_class(writer: RunWriter, rows: Sequence[ClassScores], split: str) -> None:
    """Write the scores of each class as a table and as a plot."""
    from pipelines.training.record.plots import per_class_bars  # `grid` imports this module, and draws nothing

    writer.table(rows, f"per_class_{split}.json")
    writer.figure(per_class_bars(rows, split), f"per_class_{split}.png")


def start_run_of_model(
    config: RunConfig,
    served: ServedModel,
    manifest: Manifest,
    parameters: Mapping[str, Any],
    scores: ScoresOfModel,
    *,
    result: Result,
    verb: str,
    name: str,
    context: str,
) -> tuple[TrackedRun, TrackedRun | None]:
    """Start a run with the scores of a model on a dataset: a child of the model's run if the store has that one.

    Args:
        config: The dataset, and the experiment of a run without parent.
        served: The model.
        manifest: The dataset's.
        parameters: Parameters in addition to model and dataset.
        scores: The scores, for the error text.
        result: Result that gets the run's id.
        verb: The verb that measured the model.
        name: Name of the run.
        context: How the dataset is used.

    Returns:
        The run, and the model's run; None: the store does not have it.

    Raises:
        TrackingError: The store does not answer, or its experiment was deleted. The scores are in the message.
    """
    parent = TrackedRun(tracking_uri(), served.metadata.run_id or "")
    of_model = {
        "model": served.uri,
        "model_id": served.model_id,
        "dataset": config.dataset.path,
        "dataset_fingerprint": manifest.fingerprint,
        **parameters,
    }
    about: dict[str, Any] = {"dataset": dataset_facts(config.dataset.path, manifest), "context": context}
    try:
        if is_child := served.metadata.run_id is not None and has_run(parent):
            run = start_child_run(parent, name, of_model, tags_of(verb), **about)
        else:
            run = start_run(chosen_experiment(config.tracking.experiment), name, of_model, tags_of(verb), **about)
    except (TrackingError, ValueError) as error:
        raise scores.not_taken(str(error)) from None
    result.run_id = run.run_id
    result.save()
    return run, parent if is_child else None
