"""What is written to one run."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from pipelines.tracking.store import TrackedRun, reason_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METRICS_PER_BATCH = 1000
_log = logging.getLogger(__name__)


class RunWriter:
    """Writes to one run; used by rank 0.

    A write that fails is a warning and not the end of the training, but for the model's.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Connect."""
        self._run = run
        self._client = MlflowClient(run.uri)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """One value per metric."""
        self.curves({name: [(step, value)] for name, value in values.items()})

    def curves(self, points: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Several `(step, value)` per metric."""
        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, float(value), now, step) for name, series in points.items() for step, value in series]
        with _training_goes_on():
            for start in range(0, len(metrics), _METRICS_PER_BATCH):
                self._client.log_batch(self._run.run_id, metrics=metrics[start : start + _METRICS_PER_BATCH])

    def tags(self, values: Mapping[str, str]) -> None:
        """Tags of the run."""
        with _training_goes_on():
            for name, value in values.items():
                self._client.set_tag(self._run.run_id, name, value)

    def text(self, text: str, path: str) -> None:
        """A text artifact."""
        with _training_goes_on():
            self._client.log_text(self._run.run_id, text, path)

    def table(self, rows: Sequence[Mapping[str, Any]], path: str) -> None:
        """A table artifact, JSON as MLflow's own tables; replaces what was there, where `log_table` would append."""
        names = list(rows[0])
        data = [[None if row[name] != row[name] else row[name] for name in names] for row in rows]
        with _training_goes_on():
            self._client.log_dict(self._run.run_id, {"columns": names, "data": data}, path)

    def figure(self, figure: "Figure", path: str) -> None:
        """A PNG artifact."""
        with _training_goes_on():
            self._client.log_figure(self._run.run_id, figure, path)

    def folder(self, folder: Path, path: str) -> None:
        """All files of a folder as artifacts."""
        with _training_goes_on():
            self._client.log_artifacts(self._run.run_id, str(folder), path)


@contextmanager
def _training_goes_on() -> Iterator[None]:
    try:
        yield
    except (MlflowException, OSError) as error:  # requests' errors are OSErrors
        _log.warning("MLflow did not take a write: %s", reason_of(error))
