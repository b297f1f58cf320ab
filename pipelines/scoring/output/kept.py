"""The converted model of a folder of predictions: made once, and the same one for a job that continues."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.scoring.output.output import ACCEPTANCE_FILE, CONVERTED_FILE
from pipelines.scoring.predict.convert import Acceptance, Reference, check_accepted, convert
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.predict.processor import Runtime, why_unusable
from pipelines.storage.folder import Folder

ENOUGH_SAMPLES = 1000
"""Fewer validation samples say little: a rare class has a handful of them, and one decision moves the macro F1."""


@dataclass(frozen=True)
class ConvertedModel:
    """What OpenVINO runs."""

    file: bytes
    """What `converted.load_converted` takes."""
    acceptance: Acceptance
    made_of: dict[str, Any]
    """Identifiers of the model and of the samples that it was made of."""

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.file).hexdigest()

    def keep(self, output: Folder) -> None:
        """Write it to a folder of predictions, what describes it last."""
        if _read(output, self.made_of) is None:
            output.write(CONVERTED_FILE, self.file)
            described = {"digest": self.digest, "made_of": self.made_of, "acceptance": asdict(self.acceptance)}
            output.write(ACCEPTANCE_FILE, json.dumps(described, indent=1).encode())


def converted_model(
    model: ModelDescription,
    file: bytes,
    runtime: Runtime,
    reference: Reference | None,
    output: Folder,
    say: Callable[[str], None],
) -> ConvertedModel | None:
    """Give the converted model that a folder of predictions keeps, or convert one; None with Keras.

    Args:
        model: The model.
        file: Its `.keras` file.
        runtime: What computes the predictions.
        reference: Labelled samples; None with Keras.
        output: Folder of the predictions; nothing is written to it.
        say: Called with each line about what happens.

    Raises:
        ValueError: The converted model is worse than Keras's by more than is allowed.
        RuntimeError: The conversion failed.
    """
    if reference is None:
        return None
    reason = why_unusable(runtime)
    if reason is not None:
        say(f"score.runtime={runtime}: on this machine {reason}; executors that are like it use Keras")
    made_of = {
        "model_id": model.model_id,
        "runtime": runtime,
        "reference_fingerprint": reference.fingerprint,
        "calibration_samples": reference.calibration_samples if runtime == "int8" else 0,
    }
    kept = _read(output, made_of)
    if kept is not None:
        check_accepted(kept.acceptance, reference.max_f1_drop)
        say(f"the model was converted before: {kept.acceptance}")
        if kept.acceptance.samples != reference.acceptance_samples:
            say(
                f"score.acceptance_samples={reference.acceptance_samples} has no effect: the predictions continue with "
                f"that model, which was accepted on {kept.acceptance.samples:,} samples"
            )
        _warn_of_few_samples(kept.acceptance, say)
        return kept
    calibrated = f"calibrated on {reference.calibration_samples} training samples and " * (runtime == "int8")
    say(
        f"converting the model to {runtime}; it is {calibrated}compared with Keras on {reference.acceptance_samples} "
        "validation samples"
    )
    converted, acceptance = convert(model, file, runtime, reference)
    check_accepted(acceptance, reference.max_f1_drop)
    say(f"accepted: {acceptance}")
    _warn_of_few_samples(acceptance, say)
    return ConvertedModel(converted, acceptance, made_of)


def _warn_of_few_samples(acceptance: Acceptance, say: Callable[[str], None]) -> None:
    if acceptance.samples < ENOUGH_SAMPLES:
        say(
            f"warning: the {acceptance.runtime} model was accepted on only {acceptance.samples:,} validation samples; "
            f"on fewer than {ENOUGH_SAMPLES:,}, the two figures say little about other samples"
        )


def _read(output: Folder, made_of: dict[str, Any]) -> ConvertedModel | None:
    """The kept model, where it is whole and made of the same."""
    try:
        described = json.loads(output.read(ACCEPTANCE_FILE))
        if described["made_of"] != made_of:
            return None
        found = ConvertedModel(output.read(CONVERTED_FILE), Acceptance(**described["acceptance"]), made_of)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return found if found.digest == described["digest"] else None
