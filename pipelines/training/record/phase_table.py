"""A table of the step's phases in every epoch; it is stored beside the checkpoints, over all attempts and resumes."""

import json
import logging
from typing import Any

from pipelines.storage.folder import Location
from pipelines.training.record.phases import PHASES, StepPhases, table_of

FILE_NAME = "phases.json"
_log = logging.getLogger(__name__)


class PhaseTable:
    """The rows of all epochs so far, one per epoch and rank, in a file in the checkpoints' folder."""

    def __init__(self, checkpoints: Location, start_step: int) -> None:
        """Read the rows that earlier processes wrote about the epochs in the checkpoint.

        Args:
            checkpoints: Folder or URL of the run's checkpoints.
            start_step: Number of steps in the checkpoint from which training continues; later epochs are dropped.
        """
        self._folder = checkpoints
        self._epochs = [epoch for epoch in self._read() if epoch["step"] <= start_step]

    def add(self, phases: StepPhases, *, epoch: int, step: int) -> list[dict[str, float]]:
        """Add an epoch and return the rows of all epochs.

        Args:
            phases: Times of the parts of its steps.
            epoch: Its number, from 1.
            step: Number of optimizer steps at its end.

        Raises:
            OSError: The file cannot be written.
            StorageError: The storage behind a URL cannot be used.
        """
        self._epochs.append({"step": step, "rows": table_of(phases, epoch)})
        self._folder.make()
        self._folder.write(FILE_NAME, json.dumps(self._epochs).encode(), flush=False)
        return [row for each in self._epochs for row in each["rows"]]

    @property
    def latest(self) -> StepPhases | None:
        """The phases of the last epoch's steps; None if no epoch is known."""
        if not self._epochs:
            return None
        rows = self._epochs[-1]["rows"]
        return StepPhases(tuple({name: row[f"{name}_seconds"] for name in PHASES} for row in rows))

    def _read(self) -> list[dict[str, Any]]:
        try:
            epochs: list[dict[str, Any]] = json.loads(self._folder.read(FILE_NAME))
        except FileNotFoundError:
            return []
        except ValueError as error:
            _log.warning("%s cannot be read (%s): it starts again", self._folder / FILE_NAME, error)
            return []
        return epochs
