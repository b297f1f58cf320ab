"""The local file of a run beside its checkpoints, independent of the store."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from pipelines.storage.whole_files import NO_LOCKS, refuse_link, takes_whole_files_only, write_whole

FILE_NAME = "run.json"
CONFIG_FILE = "config.yaml"
"""File with the configuration of a run, beside its checkpoints and among its artifacts."""
DESCRIPTION_TAG = "mlflow.note.content"
"""Tag that MLflow's page shows as the description of a run or model."""
LOCK_NAME = "driver.lock"
_log = logging.getLogger(__name__)

LocalStatus = Literal["RUNNING", "TRAINED", "FINISHED", "FAILED", "KILLED"]
"""The status in MLflow, and one more: a TRAINED run lacks only records or its model in the store."""


class RunLockedError(ValueError):
    """The error when another process trains or writes a run."""


@dataclass(frozen=True)
class DatasetFacts:
    """The dataset of a run, as MLflow shows it."""

    name: str
    digest: str
    """The dataset's digest, in at most 36 characters."""
    source: str
    """Location of the dataset, without secrets."""
    schema: str
    """JSON of the columns in MLflow's format."""
    profile: str
    """JSON of counts."""


@dataclass(frozen=True)
class Description:
    """The inputs of a run."""

    experiment: str
    name: str | None
    parameters: Mapping[str, str]
    tags: Mapping[str, str]
    dataset: DatasetFacts | None = None


@dataclass(frozen=True)
class LocalRun:
    """The state of a run in its own folder, the file `run.json`."""

    run_id: Annotated[str, Field(pattern=r"^\w[\w-]*$")]
    """The store's identifier; a local one while the run is not in the store."""
    description: Description
    started: int
    """Milliseconds since 1970."""
    is_stored: bool
    """Whether the store has the run."""
    status: LocalStatus = "RUNNING"
    ended: int | None = None
    """Milliseconds since 1970."""
    is_reported: bool = False
    """Whether the store knows how the run ended."""
    has_diverged: bool = False
    """Whether the latest attempt has diverged."""

    def write(self, folder: Path) -> None:
        """Write the file atomically.

        Raises:
            OSError: The folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE_NAME, json.dumps(asdict(self), indent=1).encode())


_LOCAL_RUN = TypeAdapter(LocalRun)


def read_local_run(folder: Path) -> LocalRun | None:
    """Read the file of a run; return None if there is none.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return _LOCAL_RUN.validate_json((folder / FILE_NAME).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        problem = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder / FILE_NAME} is damaged, or of another program ({problem})") from None


def update_local_run(folder: Path, **changes: Any) -> None:
    """Change fields of a run's file; without a file, do nothing.

    Raises:
        ValueError: The file is damaged.
        OSError: The folder cannot be written.
    """
    run = read_local_run(folder)
    if run is not None:
        replace(run, **changes).write(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder during this block, so that no other driver trains or writes the run.

    Raises:
        RunLockedError: Another process has locked it.
        ValueError: The folder contains a link. Whoever made it could let this process write or remove other files.
    """
    refuse_link(folder / LOCK_NAME, "folder of a run")
    if takes_whole_files_only(folder):
        _warn_of_no_locks(folder)
        yield
        return
    with (folder / LOCK_NAME).open("a+") as lock:
        _take(lock, folder)
        for path in folder.rglob("*"):
            refuse_link(path, "folder of a run")
        yield  # the lock file stays: after a removal, two processes could lock two files of the same name


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked the folder of a run."""
    try:
        with (folder / LOCK_NAME).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    return False


def _warn_of_no_locks(folder: Path) -> None:
    _log.warning("%s: files cannot be locked here, so nothing keeps a second job from training this run", folder)


def _take(lock: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            lock.seek(0)
            raise RunLockedError(
                f"run {folder.name} is being trained or written by {lock.read() or 'another process'}: wait for it, or "
                "stop it"
            ) from None
        if error.errno not in NO_LOCKS:
            raise
        _warn_of_no_locks(folder)
        return
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
