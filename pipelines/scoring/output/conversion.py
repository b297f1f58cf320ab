"""The converted model of a folder of predictions: it is made once, and a job that continues uses it again."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.machine.json_text import parse_json
from pipelines.scoring.output.output import ACCEPTANCE_FILE, CONVERTED_FILE
from pipelines.scoring.predict.convert import Acceptance, Reference, check_accepted, convert
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.predict.processor import Runtime, why_unusable
from pipelines.storage.folder import Location

ENOUGH_SAMPLES = 1000
"""Least number of validation samples for a reliable comparison.

With fewer, a rare class has only a handful of samples, and one decision changes the macro F1.
"""


@dataclass(frozen=True)
class ConvertedModel:
    """A model that OpenVINO runs."""

    file: bytes
    """Input of `convert.load_converted`."""
    acceptance: Acceptance
    made_of: dict[str, Any]
    """Identifiers of the source model and of the samples used for the conversion."""

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.file).hexdigest()

    def store(self, output: Location) -> None:
        """Write the model to a folder of predictions, its description last."""
        if _read(output, self.made_of) is None:
            output.write(CONVERTED_FILE, self.file)
            described = {"digest": self.digest, "made_of": self.made_of, "acceptance": asdict(self.acceptance)}
            output.write(ACCEPTANCE_FILE, json.dumps(described, indent=1).encode())


def converted_model(
    model: ModelDescription,
    file: bytes,
    runtime: Runtime,
    reference: Reference | None,
    output: Location,
    say: Callable[[str], None],
) -> ConvertedModel | None:
    """Return the converted model of a folder of predictions, or convert one; None with Keras.

    Args:
        model: Description of the model.
        file: The model's `.keras` file.
        runtime: Runtime that computes the predictions.
        reference: Labelled samples; None with Keras.
        output: Folder of the predictions; nothing is written to it.
        say: Called with each message.

    Raises:
        ValueError: The converted model is worse than Keras by more than the allowed difference.
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
    stored = _read(output, made_of)
    if stored is None:
        calibrated = f"calibrated on {reference.calibration_samples} training samples and " * (runtime == "int8")
        say(
            f"converting the model to {runtime}; it is {calibrated}compared with Keras on "
            f"{reference.acceptance_samples} validation samples"
        )
    found = stored or ConvertedModel(*convert(model, file, runtime, reference), made_of)
    acceptance = found.acceptance
    check_accepted(acceptance, reference.max_f1_drop)
    say(f"{'accepted' if stored is None else 'the model was converted before'}: {acceptance}")
    if acceptance.samples != reference.acceptance_samples:
        say(
            f"score.acceptance_samples={reference.acceptance_samples} has no effect: the predictions continue with "
            f"that model, which was accepted on {acceptance.samples:,} samples"
        )
    if acceptance.samples < ENOUGH_SAMPLES:
        say(
            f"warning: the {acceptance.runtime} model was accepted on only {acceptance.samples:,} validation samples; "
            f"on fewer than {ENOUGH_SAMPLES:,}, the two figures say little about other samples"
        )
    return found


def _read(output: Location, made_of: dict[str, Any]) -> ConvertedModel | None:
    """Return the stored model if it is whole and has the same sources."""
    try:
        described = parse_json(output.read(ACCEPTANCE_FILE))
        if described["made_of"] != made_of:
            return None
        found = ConvertedModel(output.read(CONVERTED_FILE), Acceptance(**described["acceptance"]), made_of)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return found if found.digest == described["digest"] else None
