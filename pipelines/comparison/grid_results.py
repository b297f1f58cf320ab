"""The results file of a grid: JSON lines, one for each finished cell, small enough to be committed."""

import errno
import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipelines.comparison.run import SEED, ComparedRun
from pipelines.comparison.saved import problem_of
from pipelines.storage.whole_files import NO_LOCKS, os_errors_as

VERSION: Literal[1] = 1
_log = logging.getLogger(__name__)


class GridLine(BaseModel):
    """A grid was begun, perhaps on another machine."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format_version: Literal[1] = VERSION
    kind: Literal["grid"] = "grid"
    parent: str
    """MLflow run of which the cells' runs are children."""
    experiment: str


class CellLine(BaseModel):
    """A cell has ended."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format_version: Literal[1] = VERSION
    kind: Literal["cell"] = "cell"
    cell: str
    """Digest of everything that decides what comes out of the cell."""
    status: Literal["finished", "diverged", "failed"]
    settings: dict[str, Any]
    """What the grid sets."""
    error: str = ""
    """Why the cell did not finish, in one line."""
    seconds: float
    """Seconds from its start to its end, start of workers and evaluation included."""
    resumed: bool = False
    """Whether it continued an interrupted training, of which `seconds` are then only the last part."""
    epochs: int = Field(gt=0)
    """Epochs that were to be trained."""
    metrics: dict[str, float] = {}
    """Metrics of the epoch whose weights the model has."""
    run: ComparedRun | None = None
    """Its training, with a thinned history; None where no run was made."""

    @property
    def is_done(self) -> bool:
        """Whether the cell need not be trained again: a failure of the machinery may be another time's success."""
        return self.status != "failed"


_LINE: TypeAdapter[GridLine | CellLine] = TypeAdapter(Annotated[GridLine | CellLine, Field(discriminator="kind")])
_BEGINNING = b'{"format_version":1,"kind":"'


class ResultsFile:
    """A results file that a grid appends to; one process at a time."""

    def __init__(self, path: Path) -> None:
        """Open or make the file, and cut off a last line that was half written when its process died.

        Raises:
            ValueError: It cannot be written, another grid writes to it, or it is another kind of file.
        """
        with os_errors_as(ValueError, f"--results {path} cannot be written"):
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(self._file)
                problem = "another grid writes to this file" if error.errno == errno.EWOULDBLOCK else error.strerror
                raise ValueError(f"--results {path}: {problem}") from None
            _log.warning("%s is on storage without locks: make sure that no other grid writes to it", path)
        try:
            self.lines = read_lines(path)
        except ValueError:
            os.close(self._file)
            raise
        self._end_last_line(path.read_bytes())

    @property
    def cells(self) -> dict[str, CellLine]:
        """The last line of each cell, by digest."""
        return cells_of(self.lines)

    @property
    def parents(self) -> list[GridLine]:
        """Every beginning, the newest last."""
        return [line for line in self.lines if isinstance(line, GridLine)]

    def append(self, line: GridLine | CellLine) -> None:
        """Add a line in one write; it is on the disk when this returns.

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

    def _end_last_line(self, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        if len(self.lines) > data.count(b"\n"):
            os.write(self._file, b"\n")
        else:
            os.ftruncate(self._file, end)

    def close(self) -> None:
        """Let another process write."""
        os.close(self._file)


def read_lines(path: Path) -> list[GridLine | CellLine]:
    """Read a results file; a last line without its end is left out, as its process died while it wrote.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is another kind of file; names the line.
    """
    with os_errors_as(FileNotFoundError, f"--results {path} cannot be read"):
        data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    lines = []
    for number, text in enumerate(data[:end].splitlines(), 1):
        try:
            lines.append(_LINE.validate_json(text))
        except ValidationError as error:
            raise ValueError(f"--results {path}, line {number}, is no result of a grid: {problem_of(error)}") from None
    rest = data[end:]
    if rest:
        with suppress(ValidationError):  # else it was cut short
            lines.append(_LINE.validate_json(rest))
            return lines
        if rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
            raise ValueError(f"--results {path} is no file of results of a grid")
    return lines


def cells_of(lines: Sequence[GridLine | CellLine]) -> dict[str, CellLine]:
    """The last line of each cell, by digest."""
    return {line.cell: line for line in lines if isinstance(line, CellLine)}


def runs_of(lines: Sequence[GridLine | CellLine], source: str) -> list[ComparedRun]:
    """Return the trainings of a results file: the last one of each cell."""
    return [line.run.model_copy(update={"source": source}) for line in cells_of(lines).values() if line.run is not None]


def estimated_seconds(settings: Mapping[str, Any], epochs: int, finished: Sequence[CellLine]) -> float | None:
    """Estimate the time of a cell from the finished ones that have most of its settings; None where there is none.

    Args:
        settings: What the grid sets in the cell.
        epochs: Epochs to be trained.
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
