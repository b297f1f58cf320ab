"""The results file of a grid: JSON lines, one for each finished cell, small enough to commit."""

import errno
import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from pipelines.comparison.run import SEED, ComparedRun, StoredModel, problem_of
from pipelines.storage.whole_files import NO_LOCKS, os_errors_as

_log = logging.getLogger(__name__)


class ResultsLine(StoredModel):
    """The base of all lines."""

    format_version: Literal[1] = 1


class GridLine(ResultsLine):
    """The start of a grid, perhaps on another machine."""

    kind: Literal["grid"] = "grid"
    parent: str
    """MLflow run that is the parent of the cells' runs."""
    experiment: str


class CellLine(ResultsLine):
    """The end of a cell."""

    kind: Literal["cell"] = "cell"
    cell: str
    """Digest of all inputs that determine the result of the cell."""
    status: Literal["finished", "diverged", "failed"]
    settings: dict[str, Any]
    error: str = ""
    """Reason why the cell did not finish, in one line."""
    seconds: float
    """Seconds from the start to the end of the cell, including the start of workers and the evaluation."""
    resumed: bool = False
    """Whether the cell resumed an interrupted training; then `seconds` are only its last part."""
    epochs: int = Field(gt=0)
    """Configured number of epochs."""
    metrics: dict[str, float] = Field(default={})
    """Metrics of the epoch whose weights the model has."""
    run: ComparedRun | None = None
    """Training of the cell, with a thinned history; None if no run was created."""

    @property
    def is_done(self) -> bool:
        """Whether the cell need not be trained again; after an infrastructure failure, another attempt may succeed."""
        return self.status != "failed"


_LINE: TypeAdapter[GridLine | CellLine] = TypeAdapter(Annotated[GridLine | CellLine, Field(discriminator="kind")])
_BEGINNING = b'{"format_version":1,"kind":"'


class ResultsFile:
    """A results file to which one process at a time appends."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and cut off an incomplete last line of a dead process.

        Raises:
            ValueError: The file cannot be written, another grid writes to it, or it is of another kind.
        """
        with os_errors_as(ValueError, f"--results {path} cannot be written"):
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        with ExitStack() as if_refused:
            if_refused.callback(os.close, self._file)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    problem = "another grid writes to this file" if error.errno == errno.EWOULDBLOCK else error.strerror
                    raise ValueError(f"--results {path}: {problem}") from None
                _log.warning("%s is on storage without locks: make sure that no other grid writes to it", path)
            self.lines = read_lines(path)
            if_refused.pop_all()
        data = path.read_bytes()
        if len(self.lines) > data.count(b"\n"):
            os.write(self._file, b"\n")
        else:
            os.ftruncate(self._file, data.rfind(b"\n") + 1)

    @property
    def cells(self) -> dict[str, CellLine]:
        """The last line of each cell, by digest."""
        return cells_of(self.lines)

    @property
    def parents(self) -> list[GridLine]:
        """The lines of all starts, the newest last."""
        return [line for line in self.lines if isinstance(line, GridLine)]

    def append(self, line: GridLine | CellLine) -> None:
        """Append a line in one write; it is on the disk when this returns.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        data = json.dumps(line.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        size = os.fstat(self._file).st_size
        if os.write(self._file, data) != len(data):
            os.ftruncate(self._file, size)
            raise OSError(f"the disk is full: a finished cell could not be written ({line.model_dump_json()[:200]})")
        os.fsync(self._file)
        self.lines.append(line)

    def close(self) -> None:
        """Close the file, so that another process can write."""
        os.close(self._file)


def read_lines(path: Path) -> list[GridLine | CellLine]:
    """Read a results file without an incomplete last line, whose process died during the write.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is of another kind; the text contains the line.
    """
    with os_errors_as(FileNotFoundError, f"--results {path} cannot be read"):
        data = path.read_bytes()
    *whole, rest = data.split(b"\n")
    lines = []
    for number, text in enumerate([*whole, rest] if rest else whole, 1):
        try:
            lines.append(_LINE.validate_json(text))
        except ValidationError as error:
            if number <= len(whole):
                raise ValueError(
                    f"--results {path}, line {number}, is no result of a grid: {problem_of(error)}"
                ) from None
            if rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:  # else an incomplete line
                raise ValueError(f"--results {path} is no file of results of a grid") from None
    return lines


def cells_of(lines: Sequence[GridLine | CellLine]) -> dict[str, CellLine]:
    """Return the last line of each cell, by digest."""
    return {line.cell: line for line in lines if isinstance(line, CellLine)}


def runs_of(lines: Sequence[GridLine | CellLine], source: str) -> list[ComparedRun]:
    """Return the trainings of a results file: the last one of each cell."""
    return [line.run.model_copy(update={"source": source}) for line in cells_of(lines).values() if line.run is not None]


def estimated_seconds(settings: Mapping[str, Any], epochs: int, finished: Sequence[CellLine]) -> float | None:
    """Estimate the time of a cell from the finished cells with most of its settings; return None without such cells.

    Args:
        settings: Settings of the grid in the cell.
        epochs: Number of epochs to train.
        finished: Lines of cells.
    """
    timed = [line for line in finished if line.status == "finished" and not line.resumed]
    if not timed:
        return None
    alike = [sum(line.settings.get(key) == value for key, value in settings.items() if key != SEED) for line in timed]
    most = max(alike)
    return epochs * fmean(
        line.seconds / line.epochs for line, number in zip(timed, alike, strict=True) if number == most
    )
