"""The writer of one run, which writes through a journal."""

import io
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.tracking.journal.delivery import PATIENCE_SECONDS, Delivery, OnNews, Row, warn
from pipelines.tracking.journal.journal import Journal
from pipelines.tracking.journal.pictures import Pictures
from pipelines.tracking.metrics import unlisted
from pipelines.tracking.store.store import TrackedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS_PER_ENTRY = 1000  # MLflow's limit for one request


class Point(NamedTuple):
    """One value of a curve."""

    step: int
    """Number of optimizer steps."""
    value: float
    milliseconds: int
    """Time of the measurement, since 1970."""


def now() -> int:
    """Return the milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class RunWriter:
    """Writes to one run.

    Each method returns when the journal has the data. The data reaches the store later, in the same order: from a
    thread after `start`, else within `drain`. Entries about steps that no checkpoint contains yet wait for
    `checkpointed`. A thread of `pictures` draws and writes PNG artifacts.
    """

    def __init__(
        self,
        run: TrackedRun,
        folder: Path,
        *,
        restart_step: int | None = None,
        on_news: OnNews = warn,
        own_metrics: Sequence[str] = (),
    ) -> None:
        """Open the journal.

        Args:
            run: The run.
            folder: Folder of the journal; a journal of an earlier process is continued.
            restart_step: Optimizer steps of the checkpoint from which training starts; see `Journal`.
            on_news: Called when the store stops answering and when it answers again, from the thread that delivers.
            own_metrics: Names of the user's own metrics.
        """
        self._own_metrics = tuple(own_metrics)
        self._journal = Journal(folder, restart_step)
        self._delivery = Delivery(run, self._journal, on_news)
        self.pictures = Pictures(self.figure)

    def start(self) -> None:
        """Deliver from a thread from now on."""
        self._delivery.start()

    def metrics(self, values: Mapping[str, float], step: int, *, after_step: int = 0) -> None:
        """Write one value per metric; `pipelines.tracking.metrics` lists the names."""
        measured = now()
        self.curves({name: [Point(step, value, measured)] for name, value in values.items()}, after_step=after_step)

    def curves(self, points: Mapping[str, Sequence[Point]], *, after_step: int = 0) -> None:
        """Write several values per metric; `pipelines.tracking.metrics` lists the names."""
        wrong = unlisted(points, self._own_metrics)
        assert not wrong, f"not listed in pipelines/tracking/metrics.py: {wrong}"
        rows = [(name, point.step, float(point.value), point.milliseconds) for name in points for point in points[name]]
        for start in range(0, len(rows), _POINTS_PER_ENTRY):
            self._journal.append("metrics", {"points": rows[start : start + _POINTS_PER_ENTRY]}, after_step=after_step)

    def absent_metrics(self, by_step: Mapping[int, Mapping[str, float]], known_by: str, *, after_step: int = 0) -> None:
        """Write metrics that the store may already have: those of steps at which it has no value of `known_by`.

        The store also gets metrics without any value there, such as a metric that a setting has just added. The check
        happens at delivery, after all earlier entries of the journal, so no value is written twice.

        Args:
            by_step: Metrics by optimizer step; unlisted names, such as own metrics of earlier runs, are left out.
            known_by: Name of a metric that is written with all others of its step.
            after_step: Optimizer steps that the metrics cover.
        """
        measured, rows = now(), list[Row]()
        for step, values in by_step.items():
            unknown = unlisted(values, self._own_metrics)
            of_step = [(name, step, float(value), measured) for name, value in values.items() if name not in unknown]
            if len(rows) + len(of_step) > _POINTS_PER_ENTRY:  # the metrics of a step stay together
                self._append_absent(rows, known_by, after_step)
                rows = []
            rows += of_step
        self._append_absent(rows, known_by, after_step)

    def _append_absent(self, rows: Sequence[Row], known_by: str, after_step: int) -> None:
        if rows:
            self._journal.append("metrics", {"points": rows, "known_by": known_by}, after_step=after_step)

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._journal.append("tags", {"tags": dict(values)}, after_step=0)

    def text(self, text: str, path: str, *, after_step: int = 0) -> None:
        """Write a text artifact; it replaces an earlier one of the same path."""
        self.data(text.encode(), path, after_step=after_step)

    def data(self, content: bytes, path: str, *, after_step: int = 0) -> None:
        """Write an artifact of any kind; it replaces an earlier one of the same path."""
        self._journal.append_file(content, path, after_step=after_step)

    def table(self, rows: Sequence[Mapping[str, Any]], path: str, *, after_step: int = 0) -> None:
        """Write a table artifact in MLflow's JSON; it replaces an earlier one, while `log_table` appends."""
        names = list(rows[0])
        data = [[None if row[name] != row[name] else row[name] for name in names] for row in rows]
        self.text(json.dumps({"columns": names, "data": data}), path, after_step=after_step)

    def figure(self, figure: "Figure", path: str, after_step: int = 0) -> None:
        """Write a PNG artifact."""
        image = io.BytesIO()
        figure.savefig(image, format="png")
        self.data(image.getvalue(), path, after_step=after_step)

    def folder(self, folder: Path, path: str) -> None:
        """Write all files of a folder as artifacts, with their content at delivery."""
        self._journal.append("folder", {"folder": self._journal.place_of(folder)}, after_step=0, path=path)

    def sync(self) -> None:
        """Wait until all entries are on the disk; see `Journal.sync`."""
        self._journal.sync()

    def checkpointed(self, step: int) -> None:
        """Record that a checkpoint contains `step` optimizer steps."""
        self._journal.checkpointed(step)

    def drain(self, patience: float = PATIENCE_SECONDS, *, answers: bool = False) -> str:
        """Wait until everything is delivered; return the reason if the store takes too long; see `Delivery.drain`."""
        return self._delivery.drain(patience, answers=answers)

    def upload_waits(self) -> AbstractContextManager[None]:
        """Give uploads outside the journal more time in this process; see `Delivery.upload_waits`."""
        return self._delivery.upload_waits()

    @property
    def pending(self) -> int:
        """The number of entries that the store does not have yet."""
        return len(self._journal)

    def close(self) -> None:
        """Close the journal after a last `drain`; a journal with remaining entries stays for the next process."""
        self._delivery.end()
        self._journal.close()
