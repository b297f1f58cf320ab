"""The driver's handling of what ranks print and report: a log for each rank, a readable part, and callbacks."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TextIO

from pipelines.launch.wire.messages import JsonObject
from pipelines.storage.whole_files import copy_whole, takes_whole_files_only

LogToDriver = Literal["all", "rank0", "callback", "none"]
_SHOWN_LINES_PER_SECOND = 200
_SHOWN_LINES_AT_ONCE = 2000
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

    def log(self, rank: int, lines: list[str]) -> None:
        """Write lines to a rank's log only."""
        if self._logs is not None:
            _call(self._logs.write, rank, lines)

    def lines(self, rank: int, lines: list[str]) -> None:
        """Handle a part of a rank's output."""
        self.log(rank, lines)
        if self._choice == "all" or (self._choice == "rank0" and rank == 0):
            _call(self._throttle.write, rank, lines)

    def shown_line(self, rank: int, line: str) -> None:
        """Handle a line that a rank passed to `log_to_driver`."""
        self.log(rank, [line])
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


class RankLogs:
    """Appends each line to `<folder>/rank-<n>.log`; storage without appending gets the files when the run ends."""

    def __init__(self, folder: Path) -> None:
        """Store the folder; each file is created with the first line of its rank."""
        self._folder = folder
        self._local: Path | None = None
        self._files: dict[int, TextIO] = {}

    def write(self, rank: int, lines: list[str]) -> None:
        """Write lines of one rank."""
        if rank not in self._files:
            self._files[rank] = self._path(rank).open("a", buffering=1)
        self._files[rank].writelines(line + "\n" for line in lines)

    def close(self) -> None:
        """Close the files.

        Raises:
            OSError: Lines could not be written; all files are closed.
        """
        with ExitStack() as stack:
            if self._local is not None:
                stack.callback(shutil.rmtree, self._local, ignore_errors=True)
                stack.callback(self._copy_back, self._local)
            for file in self._files.values():
                stack.callback(file.close)

    def _path(self, rank: int) -> Path:
        """Return the file to which lines of a rank are appended, after those of earlier runs."""
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"rank-{rank}.log"
        if self._local is None and takes_whole_files_only(self._folder):
            self._local = Path(tempfile.mkdtemp(prefix="groundswell-logs-"))
        if self._local is None:
            return log
        if log.exists():
            shutil.copyfile(log, self._local / log.name)
        return self._local / log.name

    def _copy_back(self, local: Path) -> None:
        """Replace the logs of these ranks; other files in their folder stay."""
        for rank in self._files:
            with (local / f"rank-{rank}.log").open("rb") as file:
                copy_whole(file, self._folder / f"rank-{rank}.log")


class Throttle:
    """Shows the lines of a rank up to a maximum rate, and prints how many were not shown."""

    def __init__(self, show: Callable[[int, str], None]) -> None:
        """Store `show(rank, line)`, which is called for each line that is shown."""
        self._show = show
        self._allowances: dict[int, tuple[float, float]] = {}
        self._hidden: dict[int, int] = {}

    def write(self, rank: int, lines: list[str]) -> None:
        """Write lines of one rank."""
        now = time.monotonic()
        looked, left = self._allowances.get(rank, (now, _SHOWN_LINES_AT_ONCE))
        allowance = min(_SHOWN_LINES_AT_ONCE, left + (now - looked) * _SHOWN_LINES_PER_SECOND)
        shown = lines[: int(allowance)]
        self._allowances[rank] = now, allowance - len(shown)
        if shown and self._hidden.get(rank):
            self._show(rank, f"[{self._hidden.pop(rank)} lines not shown: there were too many to read]")
        for line in shown:
            self._show(rank, line)
        self._hidden[rank] = self._hidden.get(rank, 0) + len(lines) - len(shown)

    def close(self) -> None:
        """Print how many of the last lines were not shown."""
        for rank, count in self._hidden.items():
            if count:
                self._show(rank, f"[{count} lines not shown: there were too many to read]")
