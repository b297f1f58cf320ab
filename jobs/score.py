"""`groundswell score`: the predictions of a logged model for a dataset or a raw archive."""

import argparse
import time
from contextlib import closing
from pathlib import Path

from conf.load import keys_of
from conf.schema import RunConfig
from conf.sections.archives import ROOTED_KINDS
from conf.sections.section import refuse
from jobs.prepare import configured_archive
from jobs.shell import cli
from jobs.shell.command import Result, model_uri_of, read_config, say
from jobs.shell.display import SamplesDisplay
from jobs.shell.paths import with_absolute_paths
from jobs.shell.session import spark_session
from pipelines.machine.packages import CONVERSION, DELTA, require
from pipelines.scoring.identity import ScoreSettings, check_score, earlier_thresholds
from pipelines.scoring.job import Scored, scored_before
from pipelines.scoring.job import score as score_source
from pipelines.scoring.output.ground import check_map, check_map_file, read_ground, write_map
from pipelines.scoring.output.ground_geometry import patch_metres
from pipelines.scoring.output.output import DELTA_LOG_FILE
from pipelines.scoring.predict.convert import Reference, open_reference
from pipelines.scoring.predict.model import ModelDescription, describe
from pipelines.scoring.source import DATASET, Source, archive_source, dataset_source, is_dataset
from pipelines.storage.folder import Location
from pipelines.storage.locations import local_path
from pipelines.tracking.store.served import find_model, read_model_file
from pipelines.training.setup.input import reader_settings


def score(config: RunConfig, model_uri: str, location: str, output: str, map_file: Path | None = None) -> Scored:
    """Write the predictions of a model.

    Args:
        config: The `score` section, the reader's cache, and the layout of a raw archive.
        model_uri: A model's address, in one of the spellings that `tracking.served.find_model` takes, or the file
            that `train --result` wrote.
        location: Path or URL of a prepared dataset or a raw archive.
        output: Path or URL of a folder, which may be new or contain unfinished predictions of the same call.
        map_file: A `.geojson` or `.tif` file for a map of the likeliest classes; None: no map.

    Raises:
        FileNotFoundError: The input does not exist.
        ValueError: The model does not exist or does not fit the input; `output` has other content; the map would lie in
            input or output or replace another file; or more samples are bad than `score.max_rejected_fraction`.
        RuntimeError: The store or a storage cannot be used, or Spark gave up; the same call continues the work.
    """
    config, model_uri = with_absolute_paths(config, reads_dataset=False), model_uri_of(model_uri)
    scored_folder = Location.at(location, "--input: ")
    folder = Location.at(output, "--output: ")
    source = _source(config, scored_folder)
    if map_file is not None:
        map_file = local_path(map_file, "map_file")
        check_map(map_file, {"--input": scored_folder, "--output": folder})
        patch_metres(source.groups)
    elif config.score.map_tile is not None:
        raise ValueError(f"score.map_tile={config.score.map_tile} has no effect without --map FILE")
    served = find_model(model_uri)
    model = describe(served)
    thresholds = _thresholds(config, model, source, folder)
    settings = ScoreSettings(
        config.score.batch_size,
        thresholds,
        config.launch.threads_per_worker,
        config.score.runtime,
        _reference(config, model, source, thresholds),
        as_delta=_as_delta(config, folder),
        max_rejected_fraction=config.score.max_rejected_fraction,
    )
    if model.task == "single_label" and config.score.threshold is not None:
        raise ValueError(
            f"score.threshold={config.score.threshold} has no effect: {model_uri} gives one label, the likeliest"
        )
    _, is_complete = check_score(model, source, folder, settings)
    if is_complete:
        say(f"{folder} is finished already; left as it is")
        scored = scored_before(source, folder)
    else:
        file = read_model_file(served)
        with (
            spark_session("groundswell score", config.launch.master, runs_on_connect=True) as spark,
            closing(SamplesDisplay()) as display,
        ):
            scored = score_source(spark, model, file, source, folder, settings, say=say, progress=display)
    if map_file is not None:
        _draw(source, folder, map_file, config.score.map_tile)
    return scored


def _source(config: RunConfig, folder: Location) -> Source:
    folder.check()
    if is_dataset(folder):
        return dataset_source(folder, reader_settings(config.reader))
    if not folder.exists():
        raise FileNotFoundError(f"--input {folder} does not exist")
    if config.archive is None:
        raise ValueError(
            f"--input {folder} is no prepared dataset: if it is a raw archive, say its layout with --set archive=NAME "
            f"({', '.join(ROOTED_KINDS)})"
        )
    if config.archive.kind not in ROOTED_KINDS:
        raise ValueError(
            f"--input {folder} is no prepared dataset, and archive={config.archive.kind} is not read from a folder: "
            "prepare it, and give the dataset"
        )
    archive = configured_archive(config.with_values(archive={"root": folder.url}))
    return archive_source(archive, samples_per_file=config.score.samples_per_file)


def _as_delta(config: RunConfig, output: Location) -> bool:
    """Return whether the predictions are a Delta table, because the user asks for it or the folder already is one."""
    found = config.score.format == "delta" or output.exists(DELTA_LOG_FILE)
    if found:
        require("score.format=delta", DELTA)
    return found


def _thresholds(config: RunConfig, model: ModelDescription, source: Source, output: Location) -> tuple[float, ...]:
    """Choose the thresholds: those that the user asks for, or those of the unfinished predictions."""
    output.check()
    of_model = model.thresholds_or(config.score.threshold)
    earlier = earlier_thresholds(model, source, output) if config.score.threshold is None else None
    if earlier is None or earlier == of_model:
        return of_model
    say(f"{output} was started with other thresholds than the model has now, and continues with those")
    return earlier


def _reference(
    config: RunConfig, model: ModelDescription, source: Source, thresholds: tuple[float, ...]
) -> Reference | None:
    """Return the reference samples for a converted model; None: Keras is used."""
    chosen = config.score
    if chosen.runtime == "keras":
        return None
    require(f"score.runtime={chosen.runtime}", CONVERSION)
    if chosen.reference_dataset is None and source.kind != DATASET:
        raise ValueError(
            f"score.runtime={chosen.runtime} needs labelled samples: set score.reference_dataset to a prepared dataset"
        )
    dataset = Location.at(chosen.reference_dataset or source.where, "score.reference_dataset: ")
    return open_reference(
        dataset,
        model,
        chosen.runtime,
        reader_settings(config.reader),
        calibration_samples=chosen.calibration_samples,
        acceptance_samples=chosen.acceptance_samples,
        max_f1_drop=chosen.max_f1_drop,
        thresholds=thresholds,
    )


def _refuse_unread(arguments: argparse.Namespace, config: RunConfig) -> None:
    """Refuse settings for the other kind of input."""
    location = Location.at(arguments.input, "--input: ")
    reads_reference = config.score.runtime != "keras" and config.score.reference_dataset is not None
    for key in keys_of(arguments.set):
        refuse(
            (
                key.startswith("reader.") and not (reads_reference or is_dataset(location)),
                f"--set {key} has no effect: --input {location} is no prepared dataset",
            ),
            (
                (key.split(".")[0] == "archive" or key == "score.samples_per_file") and is_dataset(location),
                f"--set {key} has no effect: --input {location} is a prepared dataset",
            ),
        )


def _draw(source: Source, output: Location, file: Path, tile: str | None) -> None:
    found = read_ground(output, source.groups, tile)
    *maps, picture = write_map(found, file)
    without = f"; {found.unplaced} predictions have no place" if found.unplaced else ""
    say(f"{', '.join(map(str, maps))} and {picture}: {len(found.table)} patches on the ground{without}")


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Score as the command line says."""
    config = read_config(arguments)
    _refuse_unread(arguments, config)
    file = None if arguments.map is None else check_map_file(arguments.map)
    model_uri = model_uri_of(arguments.model)
    result.model_uri, result.dataset, result.predictions = model_uri, arguments.input, arguments.output
    result.continue_with = []
    result.save()
    started = time.perf_counter()
    scored = score(config, model_uri, arguments.input, arguments.output, file)
    result.continue_with = None
    reasons = "".join(f"; {count} {reason}" for reason, count in scored.reasons.items())
    say(
        f"{arguments.output}: {scored.predictions} predictions, {scored.rejected} rejected{reasons}, "
        f"{time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    cli.main("score")
