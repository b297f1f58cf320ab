"""The driver's handling of all that the ranks print and report."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pipelines.launch.driver.logs import RankLogs, Throttle
from pipelines.launch.wire.messages import JsonObject

LogToDriver = Literal["all", "rank0", "callback", "none"]
_log = logging.getLogger(__name__)


class RankOutput:
    """Shows and saves the ranks' output, and calls the user's callbacks; a callback that fails is logged."""

    def __init__(
        self,
        choice: LogToDriver,
        show: Callable[[int, str], None],
        on_report: Callable[[JsonObject], None],
        folder: Path | None,
    ) -> None:
        """Listen to one attempt.

        Args:
            choice: Which lines are shown.
            show: Called with `(rank, line)` for each line that is shown.
            on_report: Called with each report and its `rank`.
            folder: Folder for the whole log of each rank.
        """
        self._choice, self._show, self._on_report = choice, show, on_report
        self._throttle = Throttle(show)
        self._logs = RankLogs(folder) if folder is not None else None

    def heading(self, rank: int, line: str) -> None:
        """Write a line of the launcher to a rank's log."""
        if self._logs is not None:
            _call(self._logs.write, rank, [line])

    def lines(self, rank: int, lines: list[str]) -> None:
        """Handle a part of a rank's output."""
        if self._logs is not None:
            _call(self._logs.write, rank, lines)
        if self._choice == "all" or (self._choice == "rank0" and rank == 0):
            _call(self._throttle.write, rank, lines)

    def shown_line(self, rank: int, line: str) -> None:
        """Handle a line that a rank passed to `log_to_driver`."""
        if self._logs is not None:
            _call(self._logs.write, rank, [line])
        if self._choice != "none":
            _call(self._show, rank, line)

    def report(self, rank: int, fields: JsonObject) -> None:
        """Handle the fields that a rank passed to `report`."""
        _call(self._on_report, {**fields, "rank": rank})

    def close(self) -> None:
        """Print how many lines were not shown, and close the files."""
        _call(self._throttle.close)
        if self._logs is not None:
            _call(self._logs.close)


def _call(function: Callable[..., None], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception:
        _log.exception("a callback of the launcher failed")
