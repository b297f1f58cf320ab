"""`groundswell evaluate`: scores, calibration, slices and a report of a logged model on a labelled split."""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from conf.schema import RunConfig
from conf.sections.section import refuse
from jobs.shell import cli
from jobs.shell.command import Result, failure_of, model_uri_of, read_config, say
from jobs.shell.paths import check_outputs, with_absolute_paths
from jobs.shell.records import ScoresOfModel, start_run_of_model, write_per_class
from jobs.shell.session import spark_session
from models.metrics import Metric, imported_metric
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.dataset.read.reader import ReaderSettings, SplitReader
from pipelines.dataset.report.html import PAGE_MARK
from pipelines.sample import TRAINING_SPLIT, VALIDATION_SPLIT
from pipelines.scoring.predict.model import ModelDescription, check_fits, describe
from pipelines.scoring.predict.symmetries import check_symmetries
from pipelines.scoring.report.evaluation import Measured, SplitScores, collect_scores, measure, read_columns
from pipelines.scoring.report.evaluation_page import evaluation_page
from pipelines.scoring.source import dataset_source
from pipelines.storage.folder import Location
from pipelines.storage.locations import absolute_path
from pipelines.storage.whole_files import write_whole
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store.runs import ended
from pipelines.tracking.store.served import ServedModel, find_model, read_model_file, store_thresholds
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.driver.checks import check_own_metrics
from pipelines.training.driver.trial import try_metrics
from pipelines.training.ranks.results import Evaluation
from pipelines.training.setup.input import reader_settings

_REMEDY = "Evaluate again to record them"
_log = logging.getLogger(__name__)


def evaluate(config: RunConfig, model_uri: str, split: str = "test", result: Result | None = None) -> Evaluation:
    """Measure a model on a split, and record the result in the model's run and in a child run of it.

    The model is sent to Spark's executors, which do not need access to MLflow: its store may be a file on this machine.
    The executors read the dataset, which must be on storage that they can access.

    Args:
        config: Dataset, reader, batch size, own metrics, thresholds.
        model_uri: A model's address, in one of the spellings that `tracking.served.find_model` takes, or the file
            that `train --result` wrote.
        split: Split of the dataset, or several with commas between them; each split is a slice.
        result: Filled in while the job runs.

    Raises:
        FileNotFoundError: The dataset does not exist, or a shard is missing.
        ValueError: The model or the split does not exist, or a shard is damaged. Or the model or a metric by import
            path does not fit the dataset. Or `evaluate.report` cannot be written.
        RuntimeError: The storage cannot be used, Spark gave up, or writing the report failed.
        TrackingError: The store did not accept the scores; they are in the message.
    """
    config, model_uri = with_absolute_paths(config), model_uri_of(model_uri)
    dataset, settings = Location.at(config.dataset.path), reader_settings(config.reader)
    manifest = read_manifest(dataset)
    report = _checked_report(config)
    splits = splits_of(split)
    name = "-".join(splits)
    is_tuned = config.evaluate.tune_thresholds and manifest.task == "multi_label"
    # Thresholds would look too good on the split that tunes them.
    tuned_on = [VALIDATION_SPLIT] if is_tuned and VALIDATION_SPLIT in {*manifest.splits} - {*splits} else []
    sources = [dataset_source(dataset, settings, chosen) for chosen in (splits, tuned_on) if chosen]
    served = find_model(model_uri)
    model = describe(served)
    check_fits(model, where=str(dataset), task=manifest.task, class_names=manifest.class_names, groups=manifest.groups)
    symmetries = config.evaluate.test_time_augmentation
    check_symmetries(symmetries, model.inputs)
    metrics = _own_metrics(config, manifest)
    file = read_model_file(served)
    with spark_session("groundswell evaluate", config.launch.master, runs_on_connect=True) as spark:
        batch_size, threads = config.training.batch_size_per_worker, config.launch.threads_per_worker
        scores, *validation = [
            collect_scores(spark, model, file, source, batch_size=batch_size, threads=threads, symmetries=symmetries)
            for source in sources
        ]
    measured = measure(
        scores,
        class_names=manifest.class_names,
        task=manifest.task,
        columns=read_columns(dataset, splits),
        own_metrics=metrics,
        validation=validation[0] if validation else None,
    )
    page = _page(config, measured, scores, splits, model, settings)
    # Before the store is used, which may be away by now.
    problem = "" if report is None else failure_of(write_whole, report, page.encode())
    run = _record(config, served, measured, name, page, manifest, result or Result("evaluate"))
    # `score` predicts each image alone: thresholds for means do not suit it.
    if (
        measured.thresholds is not None
        and symmetries is None
        and served.metadata.dataset_fingerprint == manifest.fingerprint
    ):
        store_thresholds(served, measured.thresholds.tolist())
    if problem:
        raise RuntimeError(
            f"evaluate.report={report} cannot be written ({problem}): scores and report are in MLflow run {run.run_id}"
        )
    return Evaluation(measured.metrics, measured.per_class, split=_group(config, name), run=run)


def _checked_report(config: RunConfig) -> Path | None:
    """Return the file for a copy of the report, after a check that it can be written; None: there is no copy."""
    if config.evaluate.report is None:
        return None
    report = Path(absolute_path("evaluate.report", config.evaluate.report))
    refuse(
        (not report.parent.is_dir(), f"evaluate.report={report}: there is no folder {report.parent}"),
        (report.is_dir(), f"evaluate.report={report} is a folder: give the name of a file"),
    )
    folder = report.resolve().parent  # a file is replaced; a pipe or a terminal is written directly
    is_replaced = report.is_file() or not report.exists()
    if (report.exists() and not os.access(report, os.W_OK)) or (is_replaced and not os.access(folder, os.W_OK)):
        raise ValueError(f"evaluate.report={report} cannot be written")
    check_outputs(f"evaluate.report={report}", {report: PAGE_MARK})
    return report


def splits_of(text: str) -> list[str]:
    """Return the names of the splits in the order of the source."""
    return sorted({name.strip() for name in text.split(",")})


def _group(config: RunConfig, name: str) -> str:
    """Return the group of metrics, with the images over which probabilities are averaged."""
    symmetries = config.evaluate.test_time_augmentation
    return name if symmetries is None else f"{name}_{symmetries}"


def _own_metrics(config: RunConfig, manifest: Manifest) -> dict[str, Metric]:
    """Return the user's own metrics, which were tried on the dataset's classes."""
    metrics = {
        name: imported_metric(metric.path, metric.settings, setting=f"training.metrics.{name}.path")
        for name, metric in config.training.metrics.items()
    }
    if metrics:
        check_own_metrics(config.training.metrics)
        try_metrics(metrics, manifest)
    return metrics


def _page(
    config: RunConfig,
    measured: Measured,
    scores: SplitScores,
    splits: Sequence[str],
    model: ModelDescription,
    settings: ReaderSettings,
) -> str:
    readers = [SplitReader(config.dataset.path, split, settings) for split in splits]
    facts = {"Model": model.uri, "Version": model.version, "Dataset": readers[0].manifest.fingerprint[:12]}
    if config.evaluate.test_time_augmentation is not None:
        facts["Test-time augmentation"] = config.evaluate.test_time_augmentation
    return evaluation_page(measured, scores, readers, ", ".join(splits), facts)


def _record(
    config: RunConfig,
    served: ServedModel,
    measured: Measured,
    split: str,
    page: str,
    manifest: Manifest,
    result: Result,
) -> TrackedRun:
    """Write all results to a child run, and the scores to the model's run if the store has it.

    In the model's run, the scores of averaged weights have a separate group. Scores of the training split are left out.
    Scores of another dataset are left out too, because they would replace those of the model's dataset.

    Returns:
        The child run.

    Raises:
        TrackingError: The store does not accept the scores; they are in the message.
    """
    symmetries = config.evaluate.test_time_augmentation
    parameters = {"split": split} | ({} if symmetries is None else {"test_time_augmentation": symmetries})
    name = " ".join(["evaluate", split, *filter(None, [symmetries])])
    scores = ScoresOfModel(measured.metrics, _REMEDY)
    child, parent = start_run_of_model(
        config, served, manifest, parameters, scores, result=result, verb="evaluate", name=name, context="evaluation"
    )
    step, own = served.metadata.optimizer_steps, list(config.training.metrics)
    with ended(child):
        _write(child, measured, _group(config, split), own, step, page)
    if parent is not None and served.metadata.dataset_fingerprint != manifest.fingerprint:
        _log.warning("the training had another dataset than this one: the scores are in run %s only", child.run_id)
    elif parent is not None and split != TRAINING_SPLIT:  # the training has written the curves of its own split
        weights = split if served.metadata.ema is None else f"{split}_ema"
        _write(parent, measured, _group(config, weights), own, step, None)
    return child


def _write(
    run: TrackedRun, measured: Measured, split: str, own_metrics: Sequence[str], step: int, page: str | None
) -> None:
    """Write to one run; the step of the scores is the number of the model's optimizer steps.

    Raises:
        TrackingError: The store does not accept the scores; they are in the message.
    """

    def write(writer: RunWriter) -> None:
        writer.metrics({f"{split}/{name}": value for name, value in measured.metrics.items()}, step=step)
        write_per_class(writer, measured.per_class, split)
        if page is not None:
            writer.text(page, f"evaluation_{split}.html")
            if measured.slices:
                writer.table([each.as_row() for each in measured.slices], f"slices_{split}.json")
            if measured.pairs:
                writer.table(measured.pairs, f"label_pairs_{split}.json")
            reliability = measured.reliability
            decisions = zip(reliability.counts, reliability.confidence, reliability.accuracy, strict=True)
            writer.table(
                [
                    {"decisions": int(count), "confidence": float(confidence), "accuracy": float(accuracy)}
                    for count, confidence, accuracy in decisions
                ],
                f"reliability_{split}.json",
            )

    ScoresOfModel(measured.metrics, _REMEDY).write(run, write, own_metrics=own_metrics)


def per_class_lines(result: Evaluation) -> list[str]:
    """Return the per-class table as lines of text, the most frequent class first."""
    return [
        f"{'class':<52} samples  precision  recall     F1     AP",
        *(
            f"{row['class'][:52]:<52} {row['support']:>7}  {row['precision']:>9.3f}  {row['recall']:>6.3f}  "
            f"{row['f1']:>5.3f}  {row['average_precision']:>5.3f}"
            for row in sorted(result.per_class, key=lambda row: -row["support"])
        ),
    ]


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Evaluate as the command line says."""
    config = read_config(arguments)
    result.dataset, result.model_uri = config.dataset.path, model_uri_of(arguments.model)
    evaluation = evaluate(config, result.model_uri, arguments.split, result)
    result.metrics = {f"{evaluation.split}/{name}": value for name, value in evaluation.metrics.items()}
    say(*per_class_lines(evaluation), *(f"{name}: {value:.4f}" for name, value in evaluation.metrics.items()))


if __name__ == "__main__":
    cli.main("evaluate")
