"""The locations of the runs in `training.output`, a folder on this machine or a URL, and the locks of these runs.

If it is a URL, ranks write checkpoints there (`pipelines.training.checkpoint.files`). The rest of a run's folder
(settings, logs, journals) is written to a temporary folder on this machine. It is copied to the URL when a run starts
and ends, and back when the run is resumed.
"""

import shutil
import tempfile
from atexit import register
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from pipelines.dataset.format.files import check_outside
from pipelines.storage.copies import fetch, publish
from pipelines.storage.folder import Location, StorageError
from pipelines.storage.lease import check_owner, lease
from pipelines.storage.locations import inside
from pipelines.storage.whole_files import takes_whole_files_only
from pipelines.tracking.journal.journal import driver_journal, journals, rank_journal
from pipelines.tracking.journal.local_run import RunLockedError, locked

CHECKPOINTS = "checkpoints"


def run_location(output: str, run_id: str) -> Location:
    """Return the location of a run in `training.output`: its folder or its URL.

    Raises:
        ValueError: The identifier, which a server or a file gives, leads out of `training.output`.
    """
    return Location(output) / inside(run_id, f"training.output={output}")


def checkpoints_of(output: str, run_id: str) -> Location:
    """Return the folder or URL of a run's checkpoints."""
    return run_location(output, run_id) / CHECKPOINTS


def records_folder(output: str) -> Path:
    """Return the folder on this machine with the runs' records; for a URL it is deleted when this process ends."""
    location = Location(output)
    return location.path if location.is_local else _temporary(output)


def check_output_location(output: str, dataset: str) -> None:
    """Check that `training.output` is outside the dataset, and that a URL can be used; this takes only seconds.

    Args:
        output: `training.output`.
        dataset: `dataset.path`.

    Raises:
        ValueError: The output is in the dataset.
        StorageError: The bucket does not exist, no server answers, or the credentials are missing or refused.
    """
    location = Location.at(output)
    check_outside("training.output", location, Location.at(dataset))
    location.check()


@contextmanager
def locked_run(location: Location) -> Iterator[Callable[[], None]]:
    """Lock a run, so that only one driver trains it at a time.

    Yields a function that raises RuntimeError if another driver has taken over the run.

    In a folder on this machine the lock is a locked file. Behind a URL, or if files cannot be locked, it is a lease
    beside the checkpoints. A lease expires if it is not refreshed for a minute.

    Args:
        location: Folder or URL of the run.

    Raises:
        RunLockedError: Another driver trains the run.
        StorageError: The storage behind a URL cannot be used.
    """
    if location.is_local and not takes_whole_files_only(location.path):
        with locked(location.path):
            yield lambda: None
        return
    location.make(CHECKPOINTS)
    with ExitStack() as stack:
        try:
            # The lease is not beside the records, because the driver copies these to its own disk and back.
            stack.enter_context(lease(location, CHECKPOINTS))
        except StorageError:
            raise
        except RuntimeError as error:
            raise RunLockedError(str(error)) from None
        yield lambda: check_owner(location, CHECKPOINTS)


def local_records(location: Location) -> Path:
    """Return a run's folder; if the run is behind a URL, its records without checkpoints are first copied here.

    Raises:
        StorageError: The storage cannot be used.
    """
    if location.is_local:
        return location.path
    target = records_folder(str(location.parent)) / location.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    fetch(location, target, without=CHECKPOINTS)
    return target


def publish_records(output: str, run_id: str, *, failed: bool = False) -> None:
    """Copy a run's records from `records_folder` to its URL, if it has one.

    Args:
        output: `training.output`.
        run_id: The run.
        failed: Whether the run ends with an error. Rank 0's journal may then not have been fetched, so it stays.
            Entries that were already delivered are delivered again, which is harmless.

    Raises:
        OSError: The stored data differ.
        StorageError: The storage cannot be used.
    """
    location = run_location(output, run_id)
    if not location.is_local:
        mirrors = driver_journal(Path()) if failed else journals(Path())
        publish(records_folder(output) / run_id, location, mirrors=str(mirrors))


def fetch_rank_journal(location: Location, folder: Path) -> None:
    """Copy the rest of rank 0's journal from a run's URL into the run's local folder; only rank 0 writes it."""
    if not location.is_local:
        journal = rank_journal(folder)
        shutil.rmtree(journal, ignore_errors=True)
        fetch(location / str(rank_journal(Path())), journal)


class RankJournal:
    """The folder of rank 0's journal on its own host, and the copy behind the run's URL, with what MLflow refused."""

    def __init__(self, checkpoints: Location) -> None:
        """Read the entries that an earlier process has left.

        Args:
            checkpoints: Folder or URL of the run's checkpoints.
        """
        self._run = checkpoints.parent
        if self._run.is_local:
            self._local = self._run.path
        else:
            self._local = Path(tempfile.mkdtemp(prefix="groundswell-journal-"))
            register(shutil.rmtree, self._local, ignore_errors=True)
            fetch_rank_journal(self._run, self._local)
        self.folder = rank_journal(self._local)

    def publish(self) -> None:
        """Update the copy, if there is one; called before a checkpoint, so that its records are as safe as it."""
        if not self._run.is_local:
            publish(self._local, self._run, mirrors=str(rank_journal(Path())))


@cache
def _temporary(url: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="groundswell-output-"))
    register(shutil.rmtree, folder, ignore_errors=True)
    return folder
