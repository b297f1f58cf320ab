"""Decides before Spark starts whether predictions may be written, continued or left as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conf.sections.score import ScoreConfig
from pipelines.dataset.format.files import relation
from pipelines.dataset.prepare.notes import check_rejected
from pipelines.scoring.output.conversion import ConvertedModel
from pipelines.scoring.output.output import (
    DELTA_LOG_FILE,
    REJECTED_FILE,
    Identity,
    check_ours,
    find_written,
    is_complete,
    outdated_parts,
    read_identity,
    refuse_another,
    was_replaced,
)
from pipelines.scoring.predict.convert import Reference
from pipelines.scoring.predict.model import ModelDescription, check_fits
from pipelines.scoring.predict.processor import Runtime
from pipelines.scoring.source import DATASET, Source
from pipelines.storage.folder import Location
from pipelines.storage.locations import redacted
from pipelines.storage.lock import check_place

_THRESHOLD = "score.threshold"
_INPUT, _KIND, _FINGERPRINT = "input", "input_kind", "input_fingerprint"


@dataclass(frozen=True)
class ScoreSettings:
    """Settings of scoring."""

    batch_size: int
    thresholds: tuple[float, ...]
    """Least probability of each predicted class of a multi-label model."""
    threads: int | None
    """Number of threads of one task; None: the cores of the Spark task."""
    runtime: Runtime
    reference: Reference | None
    """Labelled samples on which a converted model is compared; None with Keras."""
    as_delta: bool
    """Whether the predictions also become a Delta table."""
    max_rejected_fraction: float = ScoreConfig.default("max_rejected_fraction")
    """Largest allowed fraction of rejected samples; with more of them the job fails."""


def earlier_thresholds(model: ModelDescription, source: Source, output: Location) -> tuple[float, ...] | None:
    """Return the thresholds of this model's unfinished predictions; None if there are none.

    An evaluation may have tuned the model's own thresholds since then.

    Raises:
        ValueError: The description of the predictions is damaged.
        RuntimeError: The storage cannot be used.
    """
    identity = read_identity(output) or {}
    found = identity.get(_THRESHOLD)
    if found is None or identity.get("model_id") != model.model_id or is_complete(output, source.files):
        return None
    return tuple(found) if isinstance(found, list) else (found,) * len(model.class_names)


def check_score(
    model: ModelDescription, source: Source, output: Location, settings: ScoreSettings
) -> tuple[Identity, bool]:
    """Check everything that can be checked before Spark starts.

    Returns:
        The identity of the predictions, and whether they are already finished.

    Raises:
        ValueError: The model does not fit the samples, `output` holds something else or other predictions, or too many
            samples are known to be bad.
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
    files = source.files
    found = find_written(output, files)
    outdated = outdated_parts(source, found)
    complete = is_complete(output, files) and not outdated
    if not complete:  # only more samples can become bad; finished predictions stay finished
        rejected = [row for file, part in found.items() if file not in outdated for row in part.rejected]
        check_allowed_rejected([*source.rejected, *rejected], source, output, settings)
        check_place(output, "--output")
    return identity, complete and (not settings.as_delta or output.exists(DELTA_LOG_FILE))


def check_allowed_rejected(
    rejected: Sequence[dict[str, str]], source: Source, output: Location, settings: ScoreSettings
) -> None:
    """Make sure that at most the allowed part of the samples is rejected."""
    total = len(source.rejected) + sum(part.rows for part in source.parts)
    report = f"{redacted(str(output))}/{REJECTED_FILE}" if output.exists(REJECTED_FILE) else None
    check_rejected(rejected, total, "score.max_rejected_fraction", settings.max_rejected_fraction, report)


def settings_of_job(source: Source, settings: ScoreSettings, converted: ConvertedModel | None) -> dict[str, Any]:
    """Return the settings of the job that finished the predictions, without those that have no effect."""
    reference = settings.reference
    accepted = ("calibration_samples",) * (settings.runtime == "int8") + ("max_f1_drop",)
    return {
        "score.batch_size": settings.batch_size,
        **({"score.samples_per_file": source.samples_per_file} if source.samples_per_file is not None else {}),
        "score.format": "delta" if settings.as_delta else "parquet",
        **({"launch.threads_per_worker": settings.threads} if settings.threads is not None else {}),
        **({f"score.{name}": getattr(reference, name) for name in accepted} if reference is not None else {}),
        # If a job continues: the samples on which its converted model was accepted.
        **({"score.acceptance_samples": converted.acceptance.samples} if converted is not None else {}),
    }


def _may_have_moved(source: Source, output: Location) -> bool:
    """Return whether predictions of an input with this fingerprint belong to this one, even if it has moved.

    The fingerprint of a dataset covers its pixels. That of an archive covers only the names of its files, and other
    files can have the same names. So the sizes must be equal too, and finished predictions must have the same location.
    """
    if source.kind == DATASET:
        return True
    files = source.files
    found = find_written(output, files)
    replaced = (was_replaced(part, found[part.file]) for part in source.parts if part.file in found)
    return not is_complete(output, files) and not any(replaced)


def _identity(model: ModelDescription, source: Source, settings: ScoreSettings) -> Identity:
    reference, thresholds = settings.reference, settings.thresholds
    one_or_all = thresholds[0] if len(set(thresholds)) == 1 else list(thresholds)
    return {
        "model_id": model.model_id,
        "model_version": model.version,
        _INPUT: source.where,
        _KIND: source.kind,
        _FINGERPRINT: source.fingerprint,
        **({_THRESHOLD: one_or_all} if model.task == "multi_label" else {}),
        "score.runtime": settings.runtime,
        **({"reference_fingerprint": reference.fingerprint} if reference is not None else {}),
        **(
            {"score.calibration_samples": reference.calibration_samples}
            if reference is not None and settings.runtime == "int8"
            else {}
        ),
    }


def _check_apart(source: Source, output: Location) -> None:
    """Make sure that neither of input and predictions contains the other."""
    if source.where == source.kind:  # an archive without files
        return
    found = relation(output, Location.at(source.where))
    if found is not None:
        raise ValueError(
            f"--output {output} {found} --input {source.where}: choose another --output, outside of --input"
        )
