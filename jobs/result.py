"""What `--result FILE` holds, so that jobs can be chained."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

RUNNING = "running"


@dataclass
class Result:
    """What is known of a job; filled in while it runs, so that a failure keeps what was known before."""

    verb: str
    exit_code: int | None = None
    """Null while the job runs, and for ever where the process was killed."""
    ended: str = RUNNING
    """Why it ended: `finished`, `interrupted`, or the error's message."""
    dataset: str | None = None
    """Path or URL of the dataset that was written or read."""
    run_id: str | None = None
    """MLflow's id of the run."""
    model_uri: str | None = None
    """Where `groundswell evaluate --model` finds the model."""
    checkpoint: str | None = None
    """Newest checkpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the epoch whose weights the model has, or of the evaluation."""
    continue_with: list[str] | None = None
    """Arguments that, added to the same command, continue the job; null where nothing is there to continue."""

    def write(self, path: Path) -> None:
        """Write all of it as JSON; the file is replaced at once, never half written.

        Raises:
            OSError: The folder does not exist or is not writable.
        """
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with partial.open("w") as file:
                json.dump(asdict(self), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
