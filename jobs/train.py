"""`groundswell train`: a Spark barrier stage trains on a prepared dataset."""

import argparse
import signal
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from conf.schema import RunConfig
from jobs import cli
from jobs.command import read_config, say
from jobs.display import TrainingDisplay
from jobs.paths import with_absolute_paths
from jobs.ranks import barrier_runner
from jobs.result import Result
from jobs.session import spark_session
from pipelines.dataset.manifest import Manifest
from pipelines.launch.failure import RankLostError
from pipelines.launch.preflight import check_cluster
from pipelines.locations import redacted
from pipelines.tracking import store
from pipelines.tracking.store import TrackedRun
from pipelines.training import entry
from pipelines.training.checkpoint import list_checkpoints
from pipelines.training.checks import check_dataset, check_output, check_resume
from pipelines.training.driver_record import newest_resumable, recorded_run
from pipelines.training.results import TrainingSummary


@dataclass(frozen=True)
class TrainedRun:
    """A finished training and where everything of it is."""

    run: TrackedRun
    summary: TrainingSummary
    folder: Path
    """Checkpoints and logs."""


def train(config: RunConfig, result: Result | None = None) -> TrainedRun:
    """Train as configured, in a new session where none is running.

    Args:
        config: Dataset, model, recipe and workers.
        result: Filled in while the job runs; after a failure it says from where to continue.
    """
    result = result or Result("train")
    config = with_absolute_paths(config)
    result.dataset = config.dataset.path
    manifest = check_dataset(config)
    config = _with_run_to_resume(config)
    with spark_session("groundswell train", config.launch.master) as spark:
        return train_on(spark, config, manifest, result)


def _with_run_to_resume(config: RunConfig) -> RunConfig:
    """Put the run's identifier in place of `training.resume_run=latest`."""
    if config.training.resume_run != "latest":
        return config
    run = newest_resumable(config)
    say(f"resuming the newest unfinished run, {run.run_id} ({run.name}, {run.status.lower()})")
    if run.status == "RUNNING":
        say("MLflow shows it as running: its job has died, or make sure that no other job trains it")
    training = config.training.model_copy(update={"resume_run": run.run_id})
    return config.model_copy(update={"training": training})


def train_on(spark: SparkSession, config: RunConfig, manifest: Manifest, result: Result) -> TrainedRun:
    """Train on a running session; one MLflow run, however it ends."""
    check_cluster(spark, config.launch.num_workers, config.launch.gpus_per_worker)
    check_resume(config, manifest)
    store.check_workers_reach(store.tracking_uri(), spark.sparkContext.master)
    check_output(config)
    display = TrainingDisplay()
    with recorded_run(config, manifest, display.tracking) as record:
        say(f"MLflow run {record.run.run_id} in {redacted(record.run.uri)}")
        result.run_id = record.run.run_id
        runner = barrier_runner(
            spark,
            config.launch,
            description=f"groundswell train: {config.tracking.run_name or record.run.run_id}",
            allowed_sizes=_smaller_sizes(config),
            log_folder=record.folder / "logs",
            on_attempt=record.attempt,
            on_report=display,
        )
        summary: TrainingSummary | None = None
        try:
            try:
                summary = runner.run(entry.train, config, record.run, record.folder / "checkpoints")
            finally:
                display.close()
                record.finish(summary)
        except BaseException as error:
            _say_what_memory_needs(error, config)
            _remember_checkpoint(result, record.run, record.folder / "checkpoints")
            raise
    result.model_uri, result.checkpoint, result.metrics = (
        summary.model_uri,
        summary.checkpoint,
        summary.history[summary.model_epoch - 1],
    )
    return TrainedRun(record.run, summary, record.folder)


def _say_what_memory_needs(error: BaseException, config: RunConfig) -> None:
    """Say what to change where the kernel has killed a rank, which it does when memory is short."""
    if isinstance(error, RankLostError) and error.root.exit_code == -signal.SIGKILL:
        say(
            f"if memory was short: lower training.batch_size_per_worker={config.training.batch_size_per_worker}, or "
            "let `groundswell find-batch` find the largest that fits"
        )


def _remember_checkpoint(result: Result, run: TrackedRun, checkpoints: Path) -> None:
    """Note from where a run that did not end can be continued, or say that it cannot."""
    existing = list_checkpoints(checkpoints)
    if not existing:
        say("there is no checkpoint yet: this run can only be started again")
    else:
        result.checkpoint = str(existing[-1])
        result.continue_with = ["--set", f"training.resume_run={run.run_id}"]


def _smaller_sizes(config: RunConfig) -> list[int]:
    """Smaller numbers of workers that make up the global batch by accumulation, in batches of the same size.

    Batch norm over groups of ranks keeps its groups; that over all ranks has fewer samples then.
    """
    sizes = range(1, config.launch.num_workers)
    return [
        size for size in sizes if config.accumulation_steps(size) and size % config.model.batch_norm_span(size) == 0
    ]


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Train as the command line says."""
    trained = train(read_config(arguments), result)
    if trained.summary.ended:
        say(f"ended       {trained.summary.ended}; the model is that of epoch {trained.summary.model_epoch}")
    say(f"model       {trained.summary.model_uri}")
    if trained.summary.averaged_model_uri:
        say(f"averaged    {trained.summary.averaged_model_uri}")
    say(f"checkpoint  {trained.summary.checkpoint}")
    say(f"look at it  {store.show_command(trained.run)}")


if __name__ == "__main__":
    cli.main("train")
