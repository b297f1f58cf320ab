"""`groundswell evaluate`: test metrics of a logged model."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conf.schema import RunConfig
from conf.training import TrainingConfig
from jobs import cli
from jobs.command import read_config, say
from jobs.paths import with_absolute_paths
from jobs.ranks import barrier_runner
from jobs.result import Result
from jobs.session import spark_session
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.reader import check_readable
from pipelines.launch.preflight import check_cluster
from pipelines.storage import Folder
from pipelines.tracking import models, store
from pipelines.tracking.store import TrackedRun, TrackingError
from pipelines.tracking.writer import RunWriter
from pipelines.training import entry
from pipelines.training.checks import check_own_metrics
from pipelines.training.input import reader_settings
from pipelines.training.plots import per_class_bars
from pipelines.training.results import Evaluation
from pipelines.training.trial import try_parts


def evaluate(config: RunConfig, model_uri: str, split: str = "test") -> Evaluation:
    """Score a logged model on one split and write the metrics to the run that made it.

    Args:
        config: Dataset, workers and batch size.
        model_uri: `runs:/<run id>/model` or `models:/<name>/<version>`.
        split: Split of the dataset.

    Raises:
        FileNotFoundError: No such dataset, or a shard is missing.
        ValueError: No such model or split, a damaged shard, the model has other classes than the dataset, or a metric
            by import path does not fit.
        RuntimeError: Workers on other machines cannot reach MLflow's store.
        TrackingError: The store did not take the scores; they are in the message.
    """
    config = with_absolute_paths(config)
    dataset = Folder.at(config.dataset.path)
    manifest = read_manifest(dataset)
    check_readable(dataset, manifest, [split], reader_settings(config.reader))
    description = models.model_metadata(model_uri)
    _check_classes(model_uri, description.get("class_names"), manifest)
    if config.training.metrics:
        check_own_metrics(config)
        only = TrainingConfig(metrics=config.training.metrics)
        try_parts(RunConfig(dataset=config.dataset, training=only), manifest)
    with spark_session("groundswell evaluate", config.launch.master) as spark:
        store.check_workers_reach(store.tracking_uri(), spark.sparkContext.master)
        check_cluster(spark, config.launch.num_workers, config.launch.gpus_per_worker)
        runner = barrier_runner(
            spark, config.launch, description=f"groundswell evaluate: {model_uri}", log_to_driver="none"
        )
        result: Evaluation = runner.run(entry.evaluate, config, model_uri, split)
    run = TrackedRun(store.tracking_uri(), description["run_id"])
    _record(run, result, split, own_metrics=list(config.training.metrics))
    return result


def _record(run: TrackedRun, result: Evaluation, split: str, *, own_metrics: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(run, Path(folder, "journal"), own_metrics=own_metrics)
        writer.metrics({f"{split}/{name}": value for name, value in result.metrics.items()}, step=0)
        writer.table(result.per_class, f"per_class_{split}.json")
        writer.figure(per_class_bars(result.per_class, split), f"per_class_{split}.png")
        reason = writer.drain()
        writer.close()
    if reason:
        scores = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        raise TrackingError(f"MLflow did not take the scores ({reason}): {scores}. Evaluate again to record them")


def _check_classes(model_uri: str, class_names: list[str] | None, manifest: Manifest) -> None:
    if class_names is None:
        raise ValueError(f"{model_uri} was not logged by groundswell: its metadata has no class_names")
    if tuple(class_names) != manifest.class_names:
        raise ValueError(
            f"{model_uri} knows {len(class_names)} classes ({class_names[0]}, ...), the dataset has "
            f"{len(manifest.class_names)} ({manifest.class_names[0]}, ...)"
        )


def per_class_lines(result: Evaluation) -> list[str]:
    """Give the per-class table as lines of text, the most frequent class first."""
    lines = [f"{'class':<52} samples  precision  recall     F1     AP"]
    for row in sorted(result.per_class, key=lambda row: -row["support"]):
        lines.append(
            f"{row['class'][:52]:<52} {row['support']:>7}  {row['precision']:>9.3f}  {row['recall']:>6.3f}  "
            f"{row['f1']:>5.3f}  {row['average_precision']:>5.3f}"
        )
    return lines


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Evaluate as the command line says."""
    config = read_config(arguments)
    result.dataset, result.model_uri = config.dataset.path, arguments.model
    evaluation = evaluate(config, arguments.model, arguments.split)
    result.metrics = {f"{arguments.split}/{name}": value for name, value in evaluation.metrics.items()}
    for line in per_class_lines(evaluation):
        say(line)
    for name, value in evaluation.metrics.items():
        say(f"{name}: {value:.4f}")


if __name__ == "__main__":
    cli.main("evaluate")
