"""The content of `--result FILE`, with which jobs can be chained."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipelines.storage.locations import local_path, redacted
from pipelines.storage.whole_files import write_whole

RUNNING = "running"


@dataclass
class Result:
    """The results of a job; they are filled in while it runs, so that a failure keeps the earlier ones."""

    verb: str
    exit_code: int | None = None
    """Exit code of the job; null while the job runs, and if its process was killed."""
    ended: str = RUNNING
    """Reason of the end: `finished`, `interrupted`, or the error's message."""
    dataset: str | None = None
    """Path or URL of the dataset that was written or read."""
    run_id: str | None = None
    """MLflow's id of the run."""
    model_uri: str | None = None
    """Address of the model for `groundswell evaluate --model`."""
    checkpoint: str | None = None
    """Newest checkpoint."""
    predictions: str | None = None
    """Path or URL of the folder of predictions."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the epoch that provides the model's weights, or of the evaluation."""
    continue_with: list[str] | None = None
    """Arguments that, added to the same command, continue the job; null: nothing can be continued."""

    def write(self, path: Path) -> None:
        """Write all results as JSON, without passwords; the file is replaced atomically.

        A link stays, and its target is replaced. A target that is no regular file, such as `/dev/stdout`, is written
        to.

        Raises:
            OSError: The folder does not exist or is not writable.
        """
        is_read_by_line = path.exists() and not path.is_file()
        text = json.dumps(self._without_passwords(), indent=None if is_read_by_line else 1)
        write_whole(path, f"{text}\n".encode())

    def _without_passwords(self) -> dict[str, Any]:
        values = {name: redacted(value) if isinstance(value, str) else value for name, value in asdict(self).items()}
        if self.continue_with is not None:
            values["continue_with"] = [redacted(text) for text in self.continue_with]
        return values


def check_replaceable(path: Path) -> None:
    """Check that a file that a result would replace is an earlier result, or empty.

    Raises:
        ValueError: The file has other content.
    """
    try:
        before = path.read_bytes() if path.is_file() else b""
        values = json.loads(before) if before.strip() else {"exit_code": None, "ended": RUNNING}
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or not {"exit_code", "ended"} <= values.keys():
        raise ValueError(f"--result {path} is a file of something else, which it would replace: choose another file")


def model_uri_of(text: str) -> str:
    """Return a model's URI or the folder of an exported model, which may be named by the file of `train --result`.

    Raises:
        ValueError: A path is misspelt, the file cannot be read, or its job logged no model.
    """
    if not text.endswith(".json"):
        is_path = "://" not in text and not text.startswith(("runs:", "models:", "mlflow-artifacts:"))
        return str(local_path(text, "--model")) if is_path else text
    file = local_path(text, "--model")
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {text} is no result of a training: {error}") from None
    if not isinstance(values, dict) or not values.get("model_uri"):
        ended = values.get("ended") if isinstance(values, dict) else None
        raise ValueError(f"--model {text}: that job has logged no model (it ended: {ended})")
    return str(values["model_uri"])
