"""What is known of a run beside its checkpoints, whether the store answers, does not, or never had the run."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from pipelines.storage.whole_files import NO_LOCKS, takes_whole_files_only

FILE_NAME = "run.json"
CONFIG_FILE = "config.yaml"
"""The configuration of a run, beside its checkpoints and among its artifacts."""
DESCRIPTION_TAG = "mlflow.note.content"
"""Tag that MLflow's page shows as the description of a run or model."""
LOCK_NAME = "driver.lock"
# What `flock` answers on a file system that has no locks, such as NFS without its lock daemon.
_log = logging.getLogger(__name__)

LocalStatus = Literal["RUNNING", "TRAINED", "FINISHED", "FAILED", "KILLED"]
"""The status that MLflow shows, and one more: a run that is trained lacks only records or its model in the store."""


class RunHeldError(ValueError):
    """A run that another process trains or writes."""


@dataclass(frozen=True)
class DatasetFacts:
    """A run's dataset, as MLflow shows it."""

    name: str
    digest: str
    """The dataset's digest, in at most 36 characters."""
    source: str
    """Place of the dataset, without secrets."""
    schema: str
    """JSON of the columns in MLflow's format."""
    profile: str
    """JSON of counts."""


@dataclass(frozen=True)
class Description:
    """What a run is made with."""

    experiment: str
    name: str | None
    parameters: Mapping[str, str]
    tags: Mapping[str, str]
    dataset: DatasetFacts | None = None


@dataclass(frozen=True)
class LocalRun:
    """A run as its own folder knows it; `run.json` there."""

    run_id: str
    """The store's identifier; one of our own while the store does not have the run."""
    description: Description
    started: int
    """Milliseconds since 1970."""
    is_stored: bool
    """Whether the store has the run."""
    status: LocalStatus = "RUNNING"
    ended: int | None = None
    """Milliseconds since 1970."""
    is_reported: bool = field(default=False)
    """Whether the store knows how the run ended."""
    has_diverged: bool = field(default=False)
    """Whether its latest attempt has ended so."""

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: The folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{FILE_NAME}.{os.getpid()}"
        with temporary.open("w") as file:
            file.write(json.dumps(asdict(self), indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / FILE_NAME)


_LOCAL_RUN = TypeAdapter(LocalRun)
_LONGEST_PROBLEM = 300


def read_local_run(folder: Path) -> LocalRun | None:
    """Read a run's file; None where there is none.

    Raises:
        ValueError: It is damaged.
    """
    try:
        return _LOCAL_RUN.validate_json((folder / FILE_NAME).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        problem = " ".join(str(error).split())[:_LONGEST_PROBLEM]
        raise ValueError(f"{folder / FILE_NAME} is damaged, or of another program ({problem})") from None


def update_local_run(folder: Path, **changes: Any) -> None:
    """Change fields of a run's file; nothing happens where there is none.

    Raises:
        ValueError: It is damaged.
        OSError: The folder cannot be written.
    """
    run = read_local_run(folder)
    if run is not None:
        replace(run, **changes).write(folder)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run's folder, so that no other driver trains or writes the run meanwhile.

    Raises:
        RunHeldError: Another process holds it.
    """
    if takes_whole_files_only(folder):
        _warn_of_no_locks(folder)
        yield
        return
    with (folder / LOCK_NAME).open("a+") as lock:
        _take(lock, folder)
        yield  # the file stays: removed, it could be locked by two processes under one name


def is_held(folder: Path) -> bool:
    """Whether a process holds the folder of a run."""
    try:
        with (folder / LOCK_NAME).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
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
            raise RunHeldError(
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
