"""`groundswell probe`: measures a linear head on the frozen features of a logged model."""

import argparse
from contextlib import closing
from functools import partial

import numpy as np

from conf.schema import RunConfig
from conf.sections.probe import CoCoAConfig
from conf.sections.section import refuse
from jobs.shell import cli
from jobs.shell.command import Result, model_uri_of, read_config, say
from jobs.shell.display import Bar
from jobs.shell.paths import with_absolute_paths
from jobs.shell.ranks import barrier_runner
from jobs.shell.records import ScoresOfModel, start_run_of_model, write_per_class
from jobs.shell.session import spark_session
from models.probes.head import LinearHead
from pipelines.dataset.format.files import check_outside
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.launch.driver.preflight import check_cluster
from pipelines.probing.extract import check_head, extract_features
from pipelines.probing.features import Features, folder_of, identity_of
from pipelines.probing.measure import Probed, comparison_lines, measure_head, penalty_lines
from pipelines.probing.worker import FittedHead, fit
from pipelines.sample import TEST_SPLIT, TRAINING_SPLIT, VALIDATION_SPLIT
from pipelines.scoring.predict.model import ModelDescription, check_inputs_fit, describe
from pipelines.scoring.report.evaluation import Measured
from pipelines.scoring.source import dataset_source
from pipelines.storage.folder import Location
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store.experiments import chosen_experiment
from pipelines.tracking.store.runs import check_store, ended
from pipelines.tracking.store.served import ServedModel, find_model, read_model_file
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.ranks.events import Event, PenaltyFitted
from pipelines.training.ranks.results import Evaluation
from pipelines.training.setup.input import reader_settings

_NAME = "groundswell probe"
_OWN_HEAD = "own_head"
"""Group of the metrics of the model's own head on the test split."""


def probe(config: RunConfig, model_uri: str, result: Result | None = None) -> Probed:
    """Fit a linear head on a model's features of the training split, and measure it on the test split.

    The features are the input of the model's classification head. Spark's executors compute the features once, the
    ranks fit the head, and the validation split chooses the penalty. The model and the dataset may have different
    classes. The result is recorded in a child run of the model's run.

    Args:
        config: Dataset, reader, batch size, ranks, and the section `probe`.
        model_uri: A model's address, in one of the spellings that `tracking.served.find_model` takes, or the file
            that `train --result` wrote.
        result: Filled in while the job runs.

    Raises:
        FileNotFoundError: The dataset does not exist, or a shard is missing.
        ValueError: The model or the split does not exist, or the model does not fit the dataset or has no dense head.
            Or penalties cannot be compared, or a sample is damaged.
        RuntimeError: The storage cannot be used, Spark gave up, or a rank died.
        TrackingError: The store did not accept the scores; they are in the message.
    """
    config, model_uri = with_absolute_paths(config), model_uri_of(model_uri)
    dataset, output = Location.at(config.dataset.path), _output(config)
    manifest = read_manifest(dataset)
    _check_splits(config, manifest)
    chosen = [split for split in (TRAINING_SPLIT, VALIDATION_SPLIT, TEST_SPLIT) if split in manifest.splits]
    source = dataset_source(dataset, reader_settings(config.reader), chosen)
    served = find_model(model_uri)
    model = describe(served)
    check_inputs_fit(model, where=str(dataset), groups=manifest.groups)
    file = read_model_file(served)
    check_head(file, len(model.class_names), model.uri)
    output.check()
    check_store(None if served.metadata.run_id is not None else chosen_experiment(config.tracking.experiment))
    identity = identity_of(model, file, manifest)
    with spark_session(_NAME, config.launch.master) as spark:
        check_cluster(spark, config.launch.num_workers, 0)
        with closing(Bar("sample")) as samples, closing(Bar("penalty")) as penalties:
            features = extract_features(
                spark,
                model,
                file,
                source,
                folder_of(output, identity),
                identity,
                batch_size=config.training.batch_size_per_worker,
                threads=config.launch.threads_per_worker,
                say=say,
                progress=lambda done, total: samples.move(
                    "features", done, total, "", f"features: {done:,} of {total:,} samples"
                ),
            )
            samples.close()
            # NumPy computes the fit: GPUs are only for the features.
            runner = barrier_runner(
                spark,
                config.launch.model_copy(update={"gpus_per_worker": 0}),
                description=_NAME,
                on_event=partial(_show_fit, penalties),
            )
            fitted: FittedHead = runner.run(fit, features, manifest.task, config.probe.solver, list(config.probe.l2))
    measured, own = _measure(config, manifest, model, features, fitted)
    run = _record(config, served, manifest, features, fitted, measured, own, result or Result("probe"))
    evaluation = Evaluation(measured.metrics, measured.per_class, split=TEST_SPLIT, run=run)
    return Probed(evaluation, own.metrics if own is not None else None, fitted)


def _show_fit(bar: Bar, event: Event) -> None:
    if isinstance(event, PenaltyFitted):
        text = f"l2 {event.l2:g} took {event.exchanges} exchanges"
        bar.move("fits", event.number, event.penalties, text, f"penalty {event.number}/{event.penalties}: {text}")


def _output(config: RunConfig) -> Location:
    output = Location.at(config.probe.output, "probe.output: ")
    if output.is_local and output.path.exists() and not output.path.is_dir():
        raise ValueError(f"probe.output={output} is a file: give a folder")
    check_outside("probe.output", output, Location.at(config.dataset.path))
    return output


def _check_splits(config: RunConfig, manifest: Manifest) -> None:
    refuse(
        *(
            (
                split not in manifest.splits,
                f"{config.dataset.path} has no split {split!r}, which a probe {use}; it has {manifest.split_names()}",
            )
            for split, use in ((TRAINING_SPLIT, "fits on"), (TEST_SPLIT, "measures on"))
        ),
        (
            len(config.probe.l2) > 1 and VALIDATION_SPLIT not in manifest.splits,
            f"probe.l2 has {len(config.probe.l2)} penalties, and {config.dataset.path} has no validation split that "
            "could choose one: set probe.l2 to one penalty",
        ),
    )


def _measure(
    config: RunConfig, manifest: Manifest, model: ModelDescription, features: Features, fitted: FittedHead
) -> tuple[Measured, Measured | None]:
    """Measure the fitted head, and the model's own head if it has the classes of the dataset."""
    tuned = manifest.task == "multi_label" and features.rows(VALIDATION_SPLIT) > 0

    def of(head: LinearHead | None) -> Measured:
        return measure_head(
            features,
            head,
            split=TEST_SPLIT,
            tuned_on=VALIDATION_SPLIT if tuned else None,
            class_names=manifest.class_names,
            task=manifest.task,
            has_probabilities=not isinstance(config.probe.solver, CoCoAConfig),
        )

    is_comparable = (model.task, model.class_names) == (manifest.task, manifest.class_names)
    return of(fitted.head), of(None) if is_comparable else None


def _record(
    config: RunConfig,
    served: ServedModel,
    manifest: Manifest,
    features: Features,
    fitted: FittedHead,
    measured: Measured,
    own: Measured | None,
    result: Result,
) -> TrackedRun:
    """Write all results to a child run of the model's run, or to a separate run; return the run.

    Raises:
        TrackingError: The store does not accept the scores; they are in the message.
    """
    parameters = {
        "split": TEST_SPLIT,
        "solver": config.probe.solver.name,
        "l2": fitted.chosen.l2,
        "l2_tried": [each.l2 for each in fitted.tried],
        "features": len(fitted.head.mean),
        "workers": config.launch.num_workers,
    }
    scores = {f"{TEST_SPLIT}/{name}": value for name, value in measured.metrics.items()}
    if own is not None:
        scores |= {f"{_OWN_HEAD}/{name}": value for name, value in own.metrics.items()}
    of_model = ScoresOfModel(scores, f"The features in {features.folder} are stored: probe again to record them")
    run, _ = start_run_of_model(
        config, served, manifest, parameters, of_model, result=result, verb="probe", name="probe", context="probe"
    )

    def write(writer: RunWriter) -> None:
        writer.metrics(scores, step=served.metadata.optimizer_steps)
        writer.data(
            fitted.head.to_npz(class_names=np.array(manifest.class_names), l2=np.array(fitted.chosen.l2)), "head.npz"
        )
        writer.table([vars(each) for each in fitted.tried], "penalties.json")
        write_per_class(writer, measured.per_class, TEST_SPLIT)

    with ended(run):
        of_model.write(run, write)
    return run


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Probe as the command line says."""
    config = read_config(arguments)
    result.dataset, result.model_uri = config.dataset.path, model_uri_of(arguments.model)
    probed = probe(config, result.model_uri, result)
    result.metrics = {f"{TEST_SPLIT}/{name}": value for name, value in probed.evaluation.metrics.items()}
    say(
        *penalty_lines(probed.fitted, config.probe.solver),
        "",
        *comparison_lines(probed.evaluation.metrics, probed.own_metrics),
    )
    if probed.own_metrics is None:
        say("the model's own head is not compared: its classes are not those of the dataset")


if __name__ == "__main__":
    cli.main("probe")
