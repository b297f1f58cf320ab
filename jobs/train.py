"""`groundswell train`: a Spark barrier stage trains on a prepared dataset."""

import argparse
import base64
import html
import io
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from conf.schema import RunConfig
from jobs.shell import cli
from jobs.shell.command import Result, read_config, say
from jobs.shell.display import TrainingDisplay
from jobs.shell.paths import with_absolute_paths
from jobs.shell.ranks import ShortageHint, barrier_runner, check_slots
from jobs.shell.session import spark_session
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.format.order import steps_per_epoch
from pipelines.sample import TRAINING_SPLIT, VALIDATION_SPLIT
from pipelines.storage.folder import Location, leaving_nothing
from pipelines.storage.locations import redacted
from pipelines.tracking.models.registry import standing
from pipelines.tracking.store import store
from pipelines.tracking.store.experiments import chosen_experiment
from pipelines.tracking.store.queries import link_to, page_of
from pipelines.tracking.store.runs import check_store
from pipelines.training import entry
from pipelines.training.checkpoint.files import list_checkpoints
from pipelines.training.driver.checks import check_dataset, check_output, check_resume
from pipelines.training.driver.output import check_output_location
from pipelines.training.driver.resumable import newest_resumable, with_stored_run
from pipelines.training.driver.run import DriverRecorder, is_divergence, recorded_run
from pipelines.training.ranks.events import CheckpointWritten, EpochTrained, Event
from pipelines.training.ranks.results import TrainingSummary
from pipelines.training.setup.resolution import described_sizes, trained_sizes

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TrainedRun:
    """A finished training, with the locations of its results."""

    run: store.TrackedRun
    summary: TrainingSummary
    folder: Location
    """Checkpoints and logs: a folder or a URL."""

    @property
    def model_uri(self) -> str:
        """MLflow's address of the model."""
        return self.summary.model_uri

    @property
    def history(self) -> "pandas.DataFrame":
        """Metrics of the epochs, one row per epoch, counted from 1."""
        import pandas

        epochs = pandas.RangeIndex(1, len(self.summary.history) + 1, name="epoch")
        return pandas.DataFrame(self.summary.history, index=epochs)

    @property
    def page(self) -> str | None:
        """Address of the run's page, if the tracking server has pages."""
        return page_of(self.run)

    def plot(self) -> "Figure":
        """Plot loss and scores by epoch."""
        from pipelines.training.record.plots import learning_curves

        return learning_curves(self.summary.history)

    def _repr_html_(self) -> str:
        """Return links and paths, the curves and the table of epochs."""
        picture, averaged = io.BytesIO(), html.escape(self.summary.averaged_model_uri)
        self.plot().savefig(picture, format="png", dpi=90)
        rows = {
            "MLflow run": link_to(self.run),
            "model": f"<code>{html.escape(self.summary.model_uri)}</code>",
            "averaged model": averaged and f"<code>{averaged}</code>",
            "checkpoint": f"<code>{html.escape(self.summary.checkpoint)}</code>",
            "logs": f"<code>{html.escape(str(self.folder / 'logs'))}</code>",
            "ended": html.escape(self.summary.ended),
            "not recorded": html.escape(self.summary.not_recorded),
        }
        left = ' style="text-align: left"'  # notebooks align the cells of tables to the right
        lines = "".join(f"<tr><th{left}>{name}</th><td{left}>{text}</td></tr>" for name, text in rows.items() if text)
        image = base64.b64encode(picture.getvalue()).decode()
        table = self.history.to_html(float_format="{:.4f}".format, border=0)
        return f'<table>{lines}</table><img alt="loss and scores by epoch" src="data:image/png;base64,{image}">{table}'


def train(config: RunConfig, result: Result | None = None) -> TrainedRun:
    """Train as configured, in a new session if none is running.

    Args:
        config: Dataset, model, recipe and workers.
        result: Filled in while the job runs; after a failure it has the arguments to continue.
    """
    result = result or Result("train")
    config = with_absolute_paths(config)
    result.dataset = config.dataset.path
    manifest = check_dataset(config)
    check_output_location(config.training.output, config.dataset.path)
    chosen, config = config, with_stored_run(with_run_to_resume(config))
    if config == chosen and not config.tracking.offline:  # otherwise the store has just answered
        check_store(experiment_of_new_run(config))
    check_run(config, manifest)  # before Spark, which takes seconds to start
    with spark_session(
        "groundswell train", config.launch.master, gpus_per_worker=config.launch.gpus_per_worker
    ) as spark:
        return train_on(spark, config, manifest, result)


def check_run(config: RunConfig, manifest: Manifest) -> None:
    """Check that the training can begin, or continue the run of `training.resume_run`, and write its output.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: See `check_resume` and `check_output`.
    """
    check_resume(config, manifest)
    with leaving_nothing(Location(config.training.output)):  # the training may be refused for another reason
        check_output(config.training, config.dataset.path)


def experiment_of_new_run(config: RunConfig) -> str | None:
    """Return the name of the experiment for the training's run; None: the training continues a run."""
    return chosen_experiment(config.tracking.experiment) if config.training.resume_run is None else None


def with_run_to_resume(config: RunConfig) -> RunConfig:
    """Put the run's identifier in place of `training.resume_run=latest`."""
    if config.training.resume_run != "latest":
        return config
    run = newest_resumable(config.training.output, config.tracking)
    say(f"resuming the newest unfinished run, {run.run_id} ({run.name}, {run.status.lower()})")
    if run.status == "RUNNING":
        say("MLflow shows it as running: its job has died, or make sure that no other job trains it")
    return config.with_values(training={"resume_run": run.run_id})


def train_on(
    spark: SparkSession, config: RunConfig, manifest: Manifest, result: Result, tags: Mapping[str, str] | None = None
) -> TrainedRun:
    """Train on a running session, in one MLflow run, however the training ends.

    Args:
        spark: The session.
        config: The configuration; its paths are absolute, and `check_run` has accepted it.
        manifest: Its dataset.
        result: Filled in while the job runs.
        tags: Further tags of a new run, such as its parent.
    """
    check_slots(spark, config.launch)
    if not config.tracking.offline:
        store.check_workers_reach(store.tracking_uri(), spark.sparkContext.master)
    display, shortage = TrainingDisplay(), ShortageHint(config)
    with recorded_run(config, manifest, display.tracking, tags) as record:
        _say_facts(record, config, manifest)
        record.environment(_cluster(spark, config))
        result.run_id = record.run.run_id
        result.save()
        if config.training.resume_run is not None:
            _remember_newest(result, record.run, record.checkpoints)

        def on_event(event: Event) -> None:
            display(event)
            shortage.take(event)
            if isinstance(event, CheckpointWritten):
                _remember_checkpoint(result, record.run, event.path)
            if may_grow(event):
                runner.grow()

        runner = barrier_runner(
            spark,
            config.launch,
            description=f"groundswell train: {record.name}",
            allowed_sizes=config.smaller_sizes,
            spares=config.launch.recover == "in_place",
            log_folder=record.folder / "logs",
            on_attempt=record.attempt,
            on_event=on_event,
        )
        try:
            try:
                with closing(display):
                    summary: TrainingSummary = runner.run(entry.train, config, record.run, record.checkpoints)
            except BaseException as error:
                record.finish(None, has_diverged=is_divergence(error))
                raise
            record.finish(summary)
        except BaseException as error:
            shortage.say(error)
            _remember_newest(result, record.run, record.checkpoints)
            raise
    result.model_uri, result.checkpoint, result.metrics, result.continue_with = (
        summary.model_uri or None,
        summary.checkpoint,
        summary.history[summary.model_epoch - 1],
        None,
    )
    return TrainedRun(record.run, summary, record.location)


def _say_facts(record: DriverRecorder, config: RunConfig, manifest: Manifest) -> None:
    """Say where the records are, which epochs are trained on smaller images, and whether there is no validation."""
    if record.run.is_offline:
        say(f"run {record.run.run_id}: {_where_records_are(record.location)}")
    else:
        say(f"MLflow run {record.run.run_id} in {redacted(record.run.uri)}")
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    sizes = described_sizes(trained_sizes(config, manifest, steps))
    if sizes:
        say(f"images of {sizes}; the training step is compiled for each size")
    if VALIDATION_SPLIT not in manifest.splits:
        say("the dataset has no validation split: only the training loss will tell trainings apart")


def _where_records_are(folder: Location) -> str:
    return f"records are kept in {folder}; `groundswell sync --output {folder.parent}` writes them to MLflow"


def _cluster(spark: SparkSession, config: RunConfig) -> dict[str, str | int | None]:
    """Return Spark's facts: its version, its master, cores and GPUs of a task, and the number of workers."""
    settings = spark.sparkContext.getConf()
    return {
        "spark": spark.version,
        "master": spark.sparkContext.master,
        "workers": config.launch.num_workers,
        "cores_per_task": settings.get("spark.task.cpus", "1") or "1",
        "gpus_per_worker": config.launch.gpus_per_worker,
        "executor_memory": settings.get("spark.executor.memory", "") or "",
    }


def _remember_newest(result: Result, run: store.TrackedRun, checkpoints: Location) -> None:
    """Record where an unfinished run can continue, or say that it cannot."""
    existing = list_checkpoints(checkpoints)
    if not existing:
        say("there is no checkpoint yet: this run can only be started again")
    else:
        _remember_checkpoint(result, run, str(existing[-1]))


def _remember_checkpoint(result: Result, run: store.TrackedRun, checkpoint: str) -> None:
    """Record where a run continues if this process is killed now."""
    result.checkpoint, result.continue_with = checkpoint, ["--set", f"training.resume_run={run.run_id}"]
    result.save()


def may_grow(event: Event) -> bool:
    """Return whether another epoch follows a finished one: its checkpoint is being written, and a stop costs least."""
    return isinstance(event, EpochTrained) and not event.is_last


def _standing(run: store.TrackedRun, name: str | None) -> str:
    """Return the alias of the registered model, or why the registry does not say it."""
    try:
        return "" if name is None else standing(run, name)
    except (ValueError, store.TrackingError) as error:
        return str(error)


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Train as the command line says."""
    config = read_config(arguments)
    trained = train(config, result)
    summary, is_offline = trained.summary, trained.run.is_offline
    lines = {
        "ended": summary.ended and f"{summary.ended}; the model is that of epoch {summary.model_epoch}",
        "model": summary.model_uri,
        "registered": summary.model_uri and _standing(trained.run, config.tracking.registered_model),
        "averaged": summary.averaged_model_uri,
        "checkpoint": summary.checkpoint,
        "records": _where_records_are(trained.folder) if is_offline else "",
        "look at it": "" if is_offline else store.show_command(trained.run),
    }
    say(*(f"{name:<12}{text}" for name, text in lines.items() if text))


if __name__ == "__main__":
    cli.main("train")
