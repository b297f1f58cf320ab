"""Computes predictions of samples in one Spark job that may be killed at any time and started again."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import pyarrow as pa
from pyspark.sql import SparkSession

from pipelines.dataset.prepare.notes import count_reasons
from pipelines.machine.console import escape
from pipelines.scoring.identity import ScoreSettings, check_allowed_rejected, check_score, settings_of_job
from pipelines.scoring.output.conversion import ConvertedModel, converted_model
from pipelines.scoring.output.output import (
    DELTA_LOG_FILE,
    FILE_NAME,
    WrittenPart,
    begin,
    clean_up,
    find_earlier,
    find_written,
    finish,
    note_name,
    outdated_parts,
    read_back,
    remove_notes,
    write_note,
    write_rejected,
)
from pipelines.scoring.output.write import PREDICTION_SCHEMA, Scorer, write_delta_log
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.predict.predictor import SentModel
from pipelines.scoring.predict.processor import why_unusable
from pipelines.scoring.source import Source
from pipelines.spark.connect import sent
from pipelines.spark.session import is_local_mode
from pipelines.spark.tasks import run_until_done, watched
from pipelines.storage.folder import Location
from pipelines.storage.inventory import is_leftover
from pipelines.storage.lease import PROGRESS_FOLDER
from pipelines.storage.locations import redacted
from pipelines.storage.lock import hold, tidy
from pipelines.storage.whole_files import disk_errors


@dataclass(frozen=True)
class ScoreProgress:
    """Progress of the job."""

    done: int
    """Number of samples in finished parts, rejected ones included."""
    total: int
    found: int
    """Number of samples in `done` that an earlier run finished."""


@dataclass(frozen=True)
class Scored:
    """Result of a job."""

    predictions: int
    rejected: int
    reasons: dict[str, int]
    """Number of rejected samples by reason."""
    new: int
    """Number of samples that this job scored or rejected itself; the others were finished before."""
    folder: str
    """Path or URL of the predictions."""

    def _repr_html_(self) -> str:
        rows = {
            "predictions": f"{self.predictions:,} in <code>{escape(redacted(self.folder))}</code>",
            "rejected": ", ".join([f"{self.rejected:,}", *(f"{n:,} {escape(why)}" for why, n in self.reasons.items())]),
            "scored by this job": f"{self.new:,}",
        }
        left = ' style="text-align: left"'  # notebooks align table cells to the right
        lines = "".join(f"<tr><th{left}>{name}</th><td{left}>{value}</td></tr>" for name, value in rows.items())
        return f"<table>{lines}</table>"


def score(
    spark: SparkSession,
    model: ModelDescription,
    file: bytes,
    source: Source,
    output: Location,
    settings: ScoreSettings,
    *,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[ScoreProgress], None] = lambda progress: None,
) -> Scored:
    """Write the predictions of all samples: one Parquet file per part of the source, and `predictions.json` last.

    Every file is written atomically. The same call again continues with the unfinished parts. It also scores parts
    again whose rejected samples can be read now, or whose files were replaced by others of another size. For other
    finished predictions it does nothing. A part stays unchanged if some of its samples can no longer be read, because
    their predictions would be lost. The input may have moved. Each sample is in exactly one file, or in
    `_rejected.parquet` with its reason.

    Args:
        spark: Session whose executors can access input and output.
        model: Description of the model.
        file: The model's `.keras` file, which is sent to the executors.
        source: Samples to score.
        output: Folder of the predictions.
        settings: Settings of scoring.
        say: Called with each message.
        progress: Called about once a second, from another thread.

    Raises:
        ValueError: `check_score` fails, or too many samples could not be scored; the same call then continues.
        RuntimeError: Another job writes there, the storage cannot be used, or Spark gave up; finished parts are kept.
    """
    identity, complete = check_score(model, source, output, settings)
    files = source.files
    if complete:
        say(f"{output} is finished already; left as it is")
        return scored_before(source, output)
    with disk_errors(output, "--output"), hold(output) as check_owner:
        found = find_written(output, files)
        outdated = outdated_parts(source, found)
        if outdated:
            say(
                f"{len(outdated)} parts are scored again, as samples that were rejected can be read now, or files were "
                "replaced"
            )
        earlier = {file: part for file, part in find_earlier(output, files).items() if file not in found}
        earlier |= {file: found.pop(file) for file in outdated}
        converted = converted_model(model, file, settings.runtime, settings.reference, output, say)
        begin(output, identity)
        if converted is not None:
            converted.store(output)
        for part in earlier.values():  # for the job that continues if this one stops
            write_note(part, output, earlier=True)
        if output.exists(FILE_NAME):  # a file of finished predictions is lost: only the found parts count from now on
            for part in found.values():
                write_note(part, output)
            output.remove(FILE_NAME)
        if output.exists(DELTA_LOG_FILE):  # it names files that are lost or will change
            output.remove(DELTA_LOG_FILE)
        remove_notes(output, set(files) - found.keys())  # otherwise a retry would see old markers and skip these parts
        if found:
            say(f"{len(found)} of {len(files)} parts are finished already")
        _write(spark, model, file, converted, source, output, settings, found, earlier, say, progress)
        check_owner()
        parts = read_back(output, files)
        unchanged = {part.file for part in parts if earlier.get(part.file) == part}
        if unchanged:
            say(
                f"{len(unchanged)} parts stay as they are, as samples of them cannot be read any more, such as "
                f"{min(unchanged)}"
            )
        rejected = write_rejected(output, parts, source.rejected)
        check_allowed_rejected(rejected, source, output, settings)
        described = {
            "class_names": list(model.class_names),
            "task": model.task,
            "model_uri": model.uri,
            "settings": settings_of_job(source, settings, converted),
            **({"acceptance": asdict(converted.acceptance)} if converted is not None else {}),
        }
        if settings.as_delta:
            write_delta_log(output, parts, _schema(source), f"Predictions of {model.uri}")
        finish(output, identity, parts, len(rejected), described)
    for used in sorted({part.computed_by for part in parts}):
        say(f"{sum(part.rows for part in parts if part.computed_by == used)} predictions by {used}")
    new = sum(part.samples for part in parts if part.file not in found.keys() | unchanged)
    return _scored(parts, source, output, new=new)


def scored_before(source: Source, output: Location) -> Scored:
    """Read the results of finished predictions, and remove the temporary files that their job left."""
    has_leftovers = any(map(is_leftover, output.files()))
    tidy(output, partial(clean_up, output, source.files), has_leftovers=has_leftovers)
    return _scored(list(find_written(output, source.files).values()), source, output, new=0)


def _write(
    spark: SparkSession,
    model: ModelDescription,
    file: bytes,
    converted: ConvertedModel | None,
    source: Source,
    output: Location,
    settings: ScoreSettings,
    found: dict[str, WrittenPart],
    earlier: dict[str, WrittenPart],
    say: Callable[[str], None],
    progress: Callable[[ScoreProgress], None],
) -> None:
    """Score the parts that are not found; those in `earlier` are scored again."""
    # In local mode the executor is this machine: if it can run the converted model, Keras is not needed.
    takes_keras = converted is None or not is_local_mode(spark) or why_unusable(settings.runtime) is not None
    rows = {note_name(part.file).rpartition("/")[2]: part.rows for part in source.parts if part.file not in found}
    total = sum(part.rows for part in source.parts)
    already = total - sum(rows.values())

    def look() -> None:
        done = already + sum(rows.get(name, 0) for name in output.names(PROGRESS_FOLDER))
        progress(ScoreProgress(done, total, already))

    with (
        sent(spark, file if takes_keras else b"") as weights,
        sent(spark, b"" if converted is None else converted.file) as sent_converted,
        watched(look, name="groundswell-score-progress"),
    ):
        scorer = Scorer(
            SentModel(model, weights, settings.batch_size, settings.threads),
            settings.runtime,
            None if converted is None else sent_converted,
            "" if converted is None else converted.digest,
            output,
            settings.thresholds,
            _schema(source),
        )
        run_until_done(
            spark,
            {part.file: (part, earlier.get(part.file)) for part in source.parts if part.file not in found},
            lambda item: scorer.write(*item),
            finished=partial(find_written, output),
            say=say,
            job="score",
            folder=output,
            less_memory="a smaller score.batch_size",
        )


def _schema(source: Source) -> pa.Schema:
    return pa.schema([*PREDICTION_SCHEMA, *source.kept])


def _scored(parts: list[WrittenPart], source: Source, output: Location, *, new: int) -> Scored:
    rejected = [*source.rejected, *(row for part in parts for row in part.rejected)]
    return Scored(sum(part.rows for part in parts), len(rejected), count_reasons(rejected), new, str(output))
