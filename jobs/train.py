"""`groundswell train`: a Spark barrier stage trains on a prepared dataset."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pyspark.sql import SparkSession

from conf.schema import RunConfig
from jobs import cli
from jobs.command import read_config, say
from jobs.display import TrainingDisplay
from jobs.paths import with_absolute_paths
from jobs.ranks import barrier_runner
from jobs.result import Result
from jobs.session import spark_session
from pipelines.dataset.manifest import Manifest, manifest_json
from pipelines.launch.preflight import check_cluster
from pipelines.launch.runner import Attempt
from pipelines.locations import redacted
from pipelines.tracking import revision, runs, store
from pipelines.tracking.store import TrackedRun
from pipelines.tracking.writer import RunWriter
from pipelines.training import entry
from pipelines.training.checkpoint import list_checkpoints
from pipelines.training.checks import check_dataset, check_output, check_resume, run_folder
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
    with spark_session("groundswell train", config.launch.master) as spark:
        return train_on(spark, config, manifest, result)


def train_on(spark: SparkSession, config: RunConfig, manifest: Manifest, result: Result) -> TrainedRun:
    """Train on a running session; one MLflow run, however it ends."""
    check_cluster(spark, config.launch.num_workers, config.launch.gpus_per_worker)
    check_resume(config, manifest)
    store.check_workers_reach(store.tracking_uri(), spark.sparkContext.master)
    check_output(config)
    run = _tracked_run(config, manifest)
    folder = run_folder(config, run.run_id)
    say(f"MLflow run {run.run_id} in {redacted(run.uri)}")
    result.run_id = run.run_id
    display = TrainingDisplay()
    with _closing(run):
        runner = barrier_runner(
            spark,
            config.launch,
            description=f"groundswell train: {config.tracking.run_name or run.run_id}",
            allowed_sizes=_smaller_sizes(config),
            log_folder=folder / "logs",
            on_attempt=_record_attempt(run),
            on_report=display,
        )
        try:
            summary = runner.run(entry.train, config, run, folder / "checkpoints")
        except BaseException:
            _remember_checkpoint(result, run, folder / "checkpoints")
            raise
        finally:
            display.close()
            RunWriter(run).folder(folder / "logs", "logs")
    result.model_uri, result.checkpoint, result.metrics = summary.model_uri, summary.checkpoint, summary.history[-1]
    return TrainedRun(run, summary, folder)


def _remember_checkpoint(result: Result, run: TrackedRun, checkpoints: Path) -> None:
    """Note from where a run that did not end can be continued, if it came so far."""
    existing = list_checkpoints(checkpoints)
    if existing:
        result.checkpoint = str(existing[-1])
        result.continue_with = ["--set", f"training.resume_run={run.run_id}"]


def _smaller_sizes(config: RunConfig) -> list[int]:
    """Numbers of workers among which the global batch divides."""
    return [size for size in range(1, config.launch.num_workers) if config.global_batch_size % size == 0]


def _record_attempt(run: TrackedRun) -> Callable[[Attempt], None]:
    writer = RunWriter(run)

    def record(attempt: Attempt) -> None:
        if attempt.number > 1:
            writer.tags({f"attempt_{attempt.number}_after": attempt.after})
        writer.tags({"attempt": str(attempt.number)})

    return record


def _tracked_run(config: RunConfig, manifest: Manifest) -> TrackedRun:
    if config.training.resume_run is not None:
        return runs.continue_run(config.training.resume_run)
    values = config.model_dump(mode="json")
    run = runs.start_run(
        config.tracking.experiment,
        config.tracking.run_name,
        _flat(values) | {"global_batch_size": config.global_batch_size, "dataset_fingerprint": manifest.fingerprint},
        {
            "mlflow.source.name": "groundswell train",
            "mlflow.source.type": "JOB",
            "dataset_fingerprint": manifest.fingerprint,
            **revision.tags(),
        },
    )
    writer = RunWriter(run)
    writer.text(yaml.safe_dump(values, sort_keys=False), "config.yaml")
    writer.text(manifest_json(manifest), "dataset.json")
    return run


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@contextmanager
def _closing(run: TrackedRun) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        runs.end_run(run, "KILLED")
        raise
    except BaseException:
        runs.end_run(run, "FAILED")
        raise
    runs.end_run(run, "FINISHED")


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Train as the command line says."""
    trained = train(read_config(arguments), result)
    say(f"model       {trained.summary.model_uri}")
    say(f"checkpoint  {trained.summary.checkpoint}")
    say(f"look at it  {store.show_command(trained.run)}")


if __name__ == "__main__":
    cli.main("train")
