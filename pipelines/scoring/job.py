"""From samples to predictions, as one Spark job that may be killed at any time and started again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from typing import Any

from pyspark.sql import SparkSession

from conf.sections.score import ScoreConfig
from pipelines.dataset.format.files import relation
from pipelines.dataset.prepare.notes import check_rejected, count_reasons
from pipelines.scoring.output.delta import write_delta_log
from pipelines.scoring.output.finished import outdated_parts, read_back, was_replaced
from pipelines.scoring.output.kept import ConvertedModel, converted_model
from pipelines.scoring.output.output import (
    DELTA_LOG_FILE,
    FILE_NAME,
    REJECTED_FILE,
    Identity,
    WrittenPart,
    begin,
    check_ours,
    clean_up,
    find_earlier,
    find_written,
    finish,
    is_complete,
    note_name,
    read_identity,
    refuse_another,
    remove_notes,
    write_note,
    write_rejected,
)
from pipelines.scoring.output.write import Scorer
from pipelines.scoring.parts import Part
from pipelines.scoring.predict.convert import Reference
from pipelines.scoring.predict.model import ModelDescription, check_fits
from pipelines.scoring.predict.processor import Runtime, why_unusable
from pipelines.scoring.source import DATASET, Source
from pipelines.spark.connect import SentFile, send
from pipelines.spark.tasks import is_local_mode, run_until_done, watched
from pipelines.storage.disk_errors import disk_errors
from pipelines.storage.folder import Folder, StorageError
from pipelines.storage.lease import PROGRESS_FOLDER
from pipelines.storage.locations import redacted
from pipelines.storage.lock import hold

_LESS_MEMORY = "a smaller score.batch_size"
_THRESHOLD = "score.threshold"
_INPUT, _KIND, _FINGERPRINT = "input", "input_kind", "input_fingerprint"


@dataclass(frozen=True)
class ScoreSettings:
    """How samples are scored."""

    batch_size: int
    thresholds: tuple[float, ...]
    """Least probability of each predicted class of a multi-label model."""
    threads: int | None
    """Threads of one task; None: the cores of the Spark task."""
    runtime: Runtime
    reference: Reference | None
    """What a converted model is compared on; None with Keras."""
    as_delta: bool
    """Whether the predictions are a Delta table too."""
    max_rejected_fraction: float = ScoreConfig.default("max_rejected_fraction")
    """More rejected samples than this part of all fail the job."""


@dataclass(frozen=True)
class ScoreProgress:
    """How far the job is."""

    done: int
    """Samples in finished parts, rejected ones included."""
    total: int
    found: int
    """Those of `done` that an earlier run had finished."""


@dataclass(frozen=True)
class Scored:
    """What came of a job."""

    predictions: int
    rejected: int
    reasons: dict[str, int]
    """Number of rejected samples by reason."""
    new: int
    """Samples that this job scored or rejected itself; the others were finished before."""
    folder: str
    """Path or URL of the predictions."""

    def _repr_html_(self) -> str:
        rows = {
            "predictions": f"{self.predictions:,} in <code>{escape(redacted(self.folder))}</code>",
            "rejected": ", ".join([f"{self.rejected:,}", *(f"{n:,} {escape(why)}" for why, n in self.reasons.items())]),
            "scored by this job": f"{self.new:,}",
        }
        left = ' style="text-align: left"'  # notebooks put the cells of tables to the right
        lines = "".join(f"<tr><th{left}>{name}</th><td{left}>{value}</td></tr>" for name, value in rows.items())
        return f"<table>{lines}</table>"


def earlier_thresholds(model: ModelDescription, source: Source, output: Folder) -> tuple[float, ...] | None:
    """Return the thresholds of this model's predictions that are not finished; None where there are none.

    They may not be the model's any more, because an evaluation has tuned others meanwhile.

    Raises:
        ValueError: What says it is damaged.
        RuntimeError: The storage cannot be used.
    """
    identity = read_identity(output) or {}
    found = identity.get(_THRESHOLD)
    is_other = identity.get("model_id") != model.model_id
    if found is None or is_other or is_complete(output, [part.file for part in source.parts]):
        return None
    return tuple(found) if isinstance(found, list) else (found,) * len(model.class_names)


def check_score(
    model: ModelDescription, source: Source, output: Folder, settings: ScoreSettings
) -> tuple[Identity, bool]:
    """Check everything that can be known before Spark starts.

    Returns:
        What decides the predictions, and whether they are finished already.

    Raises:
        ValueError: The model does not fit the samples, `output` holds something else or other predictions, or more
            samples are known to be bad than allowed.
        RuntimeError: The storage cannot be used.
    """
    check_fits(model, where=source.where, task=source.task, class_names=source.class_names, groups=source.groups)
    output.check()
    _check_apart(source, output)
    check_ours(output)
    identity = _identity(model, source, settings)
    existing = read_identity(output)
    if existing is not None:
        if all(existing.get(key) == identity[key] for key in (_KIND, _FINGERPRINT)) and _may_have_moved(source, output):
            existing = {**existing, _INPUT: source.where}
        refuse_another(existing, identity, output)
    files = [part.file for part in source.parts]
    found = find_written(output, files)
    outdated = outdated_parts(source, found)
    complete = is_complete(output, files) and not outdated
    if not complete:  # more samples may be bad, and not fewer; finished predictions stay finished
        kept = [row for file, part in found.items() if file not in outdated for row in part.rejected]
        _check_rejected([*source.rejected, *kept], source, output, settings)
    return identity, complete and (not settings.as_delta or output.exists(DELTA_LOG_FILE))


def score(
    spark: SparkSession,
    model: ModelDescription,
    file: bytes,
    source: Source,
    output: Folder,
    settings: ScoreSettings,
    *,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[ScoreProgress], None] = lambda progress: None,
) -> Scored:
    """Write the predictions of all samples: one Parquet file per part of the source, and `predictions.json` last.

    Every file appears whole, at once. The same call again continues with the parts that are not finished, and those of
    which rejected samples can be read now or files were replaced by others of another size; on other finished
    predictions it does nothing. A part stays as it is where samples of it cannot be read any more, as their predictions
    would be lost. The input may be in another place by then. Each sample is in exactly one file, or in
    `_rejected.parquet` with its reason.

    Args:
        spark: Session whose executors see input and output.
        model: What the model takes and gives.
        file: The model's `.keras` file, which is sent to the executors.
        source: What is scored.
        output: Folder of the predictions.
        settings: How.
        say: Called with each line about what happens.
        progress: Called about once a second, from another thread.

    Raises:
        ValueError: As `check_score`; or more samples could not be scored than allowed, where the same call continues.
        RuntimeError: Another job writes there, the storage cannot be used, or Spark gave up; finished parts are kept.
    """
    identity, complete = check_score(model, source, output, settings)
    files = [part.file for part in source.parts]
    if complete:
        say(f"{output} is finished already; left as it is")
        return scored_before(source, output)
    with disk_errors(output, "--output"), hold(output) as still_held:
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
            converted.keep(output)
        for part in earlier.values():  # for the job that continues if this one is stopped
            write_note(part, output, earlier=True)
        if output.exists(FILE_NAME):  # a file of finished predictions is lost: only what is found counts from now on
            for part in found.values():
                write_note(part, output)
            output.remove(FILE_NAME)
        if output.exists(DELTA_LOG_FILE):  # it names files that are lost or will change
            output.remove(DELTA_LOG_FILE)
        remove_notes(output, set(files) - found.keys())  # a retry would take these parts for finished by old notes
        if found:
            say(f"{len(found)} of {len(files)} parts are finished already")
        _write(spark, model, file, converted, source, output, settings, found, earlier, say, progress)
        still_held()
        parts = read_back(output, files)
        kept = {part.file for part in parts if earlier.get(part.file) == part}
        if kept:
            say(f"{len(kept)} parts stay as they are, as samples of them cannot be read any more, such as {min(kept)}")
        rejected = write_rejected(output, parts, source.rejected)
        _check_rejected(rejected, source, output, settings)
        described = {
            "class_names": list(model.class_names),
            "task": model.task,
            "model_uri": model.uri,
            "settings": _settings(source, settings, converted),
            **({"acceptance": asdict(converted.acceptance)} if converted is not None else {}),
        }
        if settings.as_delta:
            write_delta_log(output, parts, f"Predictions of {model.uri}")
        finish(output, identity, parts, len(rejected), described)
        clean_up(output, files)
    for used in sorted({part.computed_by for part in parts}):
        say(f"{sum(part.rows for part in parts if part.computed_by == used)} predictions by {used}")
    new = sum(part.samples for part in parts if part.file not in found.keys() | kept)
    return _scored(parts, source, output, new=new)


def _check_rejected(
    rejected: Sequence[dict[str, str]], source: Source, output: Folder, settings: ScoreSettings
) -> None:
    """Make sure that no more samples are rejected than allowed."""
    total = len(source.rejected) + sum(part.rows for part in source.parts)
    report = f"{redacted(str(output))}/{REJECTED_FILE}" if output.exists(REJECTED_FILE) else None
    check_rejected(rejected, total, "score.max_rejected_fraction", settings.max_rejected_fraction, report)


def _may_have_moved(source: Source, output: Folder) -> bool:
    """Whether predictions of an input with the same fingerprint are of this one, wherever it was then.

    The fingerprint of a dataset covers its pixels. That of an archive covers the names of its files, which those of
    another day may have too: they need the same sizes, and what is finished needs no other place.
    """
    if source.kind == DATASET:
        return True
    files = [part.file for part in source.parts]
    found = find_written(output, files)
    replaced = (was_replaced(part, found[part.file]) for part in source.parts if part.file in found)
    return not is_complete(output, files) and not any(replaced)


def scored_before(source: Source, output: Folder) -> Scored:
    """Say what is in finished predictions, and remove what a job has left that ended after it had finished them."""
    files = [part.file for part in source.parts]
    with suppress(OSError, StorageError):  # who may only read them can draw a map of them too
        clean_up(output, files)
    found = find_written(output, files)
    return _scored(list(found.values()), source, output, new=0)


def _identity(model: ModelDescription, source: Source, settings: ScoreSettings) -> Identity:
    reference = settings.reference
    return {
        "model_id": model.model_id,
        "model_version": model.version,
        _INPUT: source.where,
        _KIND: source.kind,
        _FINGERPRINT: source.fingerprint,
        **({_THRESHOLD: _briefly(settings.thresholds)} if model.task == "multi_label" else {}),
        "score.runtime": settings.runtime,
        **({"reference_fingerprint": reference.fingerprint} if reference is not None else {}),
        **(
            {"score.calibration_samples": reference.calibration_samples}
            if reference is not None and settings.runtime == "int8"
            else {}
        ),
    }


def _settings(source: Source, settings: ScoreSettings, converted: ConvertedModel | None) -> dict[str, Any]:
    """The settings of the job that finished the predictions; those that have no effect are left out."""
    reference = settings.reference
    accepted = ("calibration_samples",) * (settings.runtime == "int8") + ("max_f1_drop",)
    return {
        "score.batch_size": settings.batch_size,
        **({"score.samples_per_file": source.samples_per_file} if source.samples_per_file is not None else {}),
        "score.format": "delta" if settings.as_delta else "parquet",
        **({"launch.threads_per_worker": settings.threads} if settings.threads is not None else {}),
        **({f"score.{name}": getattr(reference, name) for name in accepted} if reference is not None else {}),
        # Of a job that continues, those on which its converted model was accepted.
        **({"score.acceptance_samples": converted.acceptance.samples} if converted is not None else {}),
    }


def _briefly(thresholds: tuple[float, ...]) -> float | list[float]:
    return thresholds[0] if len(set(thresholds)) == 1 else list(thresholds)


def _write(
    spark: SparkSession,
    model: ModelDescription,
    file: bytes,
    converted: ConvertedModel | None,
    source: Source,
    output: Folder,
    settings: ScoreSettings,
    found: dict[str, WrittenPart],
    earlier: dict[str, WrittenPart],
    say: Callable[[str], None],
    progress: Callable[[ScoreProgress], None],
) -> None:
    """Score the parts that are not found, some of them again (`earlier`)."""
    # In local mode the executor is this machine: where it can run the converted model, nothing needs Keras's.
    takes_keras = converted is None or not is_local_mode(spark) or why_unusable(settings.runtime) is not None
    with (
        _sent(spark, file if takes_keras else b"") as sent,
        _sent(spark, b"" if converted is None else converted.file) as sent_converted,
        watched(_Progress(source.parts, output, found, progress).look, name="groundswell-score-progress"),
    ):
        scorer = Scorer(
            model,
            sent,
            settings.runtime,
            None if converted is None else sent_converted,
            "" if converted is None else converted.digest,
            output,
            settings.batch_size,
            settings.thresholds,
            settings.threads,
        )
        run_until_done(
            spark,
            {part.file: (part, earlier.get(part.file)) for part in source.parts if part.file not in found},
            partial(_score_part, scorer),
            finished=partial(find_written, output),
            say=say,
            job="score",
            folder=output,
            less_memory=_LESS_MEMORY,
        )


def _score_part(scorer: Scorer, item: tuple[Part, WrittenPart | None]) -> WrittenPart:
    return scorer.write(*item)


@contextmanager
def _sent(spark: SparkSession, file: bytes) -> Iterator[SentFile]:
    """A file that each executor gets once, whoever can reach MLflow."""
    sent = send(spark, file)
    try:
        yield sent
    finally:
        with suppress(Exception):  # the JVM may have died, which is told by whoever needed it
            sent.destroy()


def _scored(parts: list[WrittenPart], source: Source, output: Folder, *, new: int) -> Scored:
    rejected = [*source.rejected, *(row for part in parts for row in part.rejected)]
    return Scored(sum(part.rows for part in parts), len(rejected), count_reasons(rejected), new, str(output))


def _check_apart(source: Source, output: Folder) -> None:
    """Make sure that predictions are not written into what is scored, nor the other way round."""
    if source.where == source.kind:  # an archive without files
        return
    found = relation(output, Folder.at(source.where))
    if found is not None:
        raise ValueError(
            f"--output {output} {found} --input {source.where}: choose another --output, outside of --input"
        )


class _Progress:
    """Counts finished parts while the job runs, by the notes that they leave."""

    def __init__(
        self,
        parts: tuple[Part, ...],
        output: Folder,
        found: dict[str, WrittenPart],
        progress: Callable[[ScoreProgress], None],
    ) -> None:
        self._rows = {note_name(part.file).rpartition("/")[2]: part.rows for part in parts if part.file not in found}
        self._total = sum(part.rows for part in parts)
        self._found = self._total - sum(self._rows.values())
        self._output, self._progress = output, progress

    def look(self) -> None:
        """Count what is finished now, and tell it."""
        done = sum(self._rows.get(name, 0) for name in self._output.names(PROGRESS_FOLDER))
        self._progress(ScoreProgress(self._found + done, self._total, self._found))
