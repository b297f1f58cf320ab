"""Trainings in files that `compare --save` wrote, perhaps on another machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.comparison.run import ComparedRun
from pipelines.storage.whole_files import os_errors_as, write_whole

_VERSION: Literal[1] = 1
SAVED_MARK = b'"runs": ['
"""Bytes near the beginning of every file of trainings."""


class _SavedRuns(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format_version: Literal[1]
    runs: list[ComparedRun]


def save_runs(runs: Sequence[ComparedRun], path: Path) -> None:
    """Write trainings as JSON atomically.

    Raises:
        ValueError: The file cannot be written, or it exists with other content.
    """
    if path.is_file() and path.stat().st_size:
        read_runs(path)  # refuses another kind of file, such as the results of a grid
    lines = ",\n".join(run.model_dump_json() for run in runs)
    write_text(path, f'{{"format_version": {_VERSION}, "runs": [\n{lines}\n]}}\n')


def read_runs(path: Path) -> list[ComparedRun]:
    """Read a file of `save_runs`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is of another kind or damaged.
    """
    with os_errors_as(FileNotFoundError, f"{path} cannot be read"):
        text = path.read_bytes()
    try:
        saved = _SavedRuns.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{path} is no file of `groundswell compare --save`: {problem_of(error)}") from None
    return [run.model_copy(update={"source": f"{path.name}: {run.source}"}) for run in saved.runs]


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        ValueError: The file cannot be written.
    """
    with os_errors_as(ValueError, f"{path} cannot be written"):
        write_whole(path, text.encode())


def problem_of(error: ValidationError) -> str:
    """Return the first problem of a file, in one line."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])
