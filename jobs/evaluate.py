"""`groundswell evaluate`: test metrics of a logged model."""

import argparse
import sys

from conf.schema import RunConfig
from jobs.command import config_arguments, read_config, run, say, with_absolute_paths
from jobs.session import spark_session
from pipelines import tracking
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.launch.preflight import check_cluster
from pipelines.launch.runner import BarrierRunner
from pipelines.storage import Folder
from pipelines.tracking import RunWriter, TrackedRun
from pipelines.training import entry
from pipelines.training.plots import per_class_bars
from pipelines.training.results import Evaluation


def evaluate(config: RunConfig, model_uri: str, split: str = "test") -> Evaluation:
    """Score a logged model on one split and write the metrics to the run that made it.

    Args:
        config: Dataset, workers and batch size.
        model_uri: `runs:/<run id>/model` or `models:/<name>/<version>`.
        split: Split of the dataset.

    Raises:
        ValueError: No such model or split, or the model has other classes than the dataset.
    """
    config = with_absolute_paths(config)
    dataset = Folder.at(config.dataset.path)
    manifest = read_manifest(dataset)
    if split not in manifest.splits:
        raise ValueError(f"{dataset} has no split {split!r}, only {', '.join(sorted(manifest.splits))}")
    description = tracking.model_metadata(model_uri)
    _check_classes(model_uri, description.get("class_names"), manifest)
    with spark_session("groundswell evaluate", config.launch.master) as spark:
        check_cluster(spark, config.launch.num_workers, config.launch.gpus_per_worker)
        runner = BarrierRunner(
            spark,
            config.launch.num_workers,
            gpus_per_worker=config.launch.gpus_per_worker,
            start_timeout=config.launch.start_timeout_seconds,
            hang_timeout=config.launch.hang_timeout_seconds,
            retries=config.launch.retries,
            accept_unencrypted=config.launch.accept_unencrypted,
            log_to_driver="none",
            threads_per_worker=config.launch.threads_per_worker,
            env=tracking.worker_environment(),
        )
        result: Evaluation = runner.run(entry.evaluate, config, model_uri, split)
    writer = RunWriter(TrackedRun(tracking.tracking_uri(), description["run_id"]))
    writer.metrics({f"{split}/{name}": value for name, value in result.metrics.items()}, step=0)
    writer.table(result.per_class, f"per_class_{split}.json")
    writer.figure(per_class_bars(result.per_class, split), f"per_class_{split}.png")
    return result


def _check_classes(model_uri: str, class_names: list[str] | None, manifest: Manifest) -> None:
    if class_names is None:
        raise ValueError(f"{model_uri} was not logged by groundswell: its metadata has no class_names")
    if tuple(class_names) != manifest.class_names:
        raise ValueError(
            f"{model_uri} knows {len(class_names)} classes ({class_names[0]}, ...), the dataset has "
            f"{len(manifest.class_names)} ({manifest.class_names[0]}, ...)"
        )


def per_class_lines(result: Evaluation) -> list[str]:
    """The per-class table as text, most frequent class first."""
    lines = [f"{'class':<52} samples  precision  recall     F1     AP"]
    for row in sorted(result.per_class, key=lambda row: -row["support"]):
        lines.append(
            f"{row['class'][:52]:<52} {row['support']:>7}  {row['precision']:>9.3f}  {row['recall']:>6.3f}  "
            f"{row['f1']:>5.3f}  {row['average_precision']:>5.3f}"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Console entry."""
    parser = argparse.ArgumentParser(prog="groundswell evaluate", description=__doc__)
    config_arguments(parser)
    parser.add_argument(
        "--model", required=True, metavar="URI", help="runs:/<run id>/model or models:/<name>/<version>"
    )
    parser.add_argument("--split", default="test", help="split to score (default: test)")
    arguments = parser.parse_args(argv)

    def body() -> int:
        result = evaluate(read_config(arguments), arguments.model, arguments.split)
        for line in per_class_lines(result):
            say(line)
        for name, value in result.metrics.items():
            say(f"{name}: {value:.4f}")
        return 0

    return run("evaluate", body)


if __name__ == "__main__":
    sys.exit(main())
