"""Where the runs of `training.output` are: in a folder of this machine, or behind a URL.

Behind a URL, ranks write checkpoints there (`checkpoint_files`). The rest of a run's folder (settings, logs, journals)
is written in a temporary folder of this machine. It is copied to the URL when a run begins and ends, and from there
when it is resumed.
"""

import shutil
import tempfile
from atexit import register
from functools import cache
from pathlib import Path

from conf.schema import RunConfig
from pipelines.dataset.format.files import check_outside
from pipelines.storage.folder import Folder
from pipelines.storage.remote_path import AnyPath, RemotePath, any_path, fetch, publish
from pipelines.tracking.journal.journal import driver_journal, journals, rank_journal

CHECKPOINTS = "checkpoints"


def run_place(config: RunConfig, run_id: str) -> AnyPath:
    """Where a run is kept: its folder, or its URL."""
    return any_path(config.training.output) / run_id


def checkpoints_of(config: RunConfig, run_id: str) -> AnyPath:
    """Folder or URL of a run's checkpoints."""
    return run_place(config, run_id) / CHECKPOINTS


def records_folder(output: str) -> Path:
    """Folder of this machine that has the records of the runs; of a URL, one that ends with this process."""
    place = any_path(output)
    return place if isinstance(place, Path) else _temporary(output)


def check_place(config: RunConfig) -> None:
    """Make sure that `training.output` is not in the dataset, and find out within seconds whether a URL can be used.

    Raises:
        ValueError: It is in the dataset.
        StorageError: There is no such bucket, nobody answers, or the credentials are missing or refused.
    """
    check_outside("training.output", Folder.at(config.training.output), Folder.at(config.dataset.path))
    place = any_path(config.training.output)
    if isinstance(place, RemotePath):
        place.folder.check()


def fetch_records(config: RunConfig, run_id: str) -> None:
    """Copy what a run behind a URL has beside its checkpoints into `records_folder`.

    Raises:
        StorageError: The storage cannot be used.
    """
    local_records(run_place(config, run_id))


def local_records(place: AnyPath) -> Path:
    """Give a run's folder; what a run behind a URL has beside its checkpoints is copied into one of this machine.

    Raises:
        StorageError: The storage cannot be used.
    """
    if isinstance(place, Path):
        return place
    target = records_folder(str(place.parent)) / place.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    fetch(place, target, without=CHECKPOINTS)
    return target


def publish_records(config: RunConfig, run_id: str, *, failed: bool = False) -> None:
    """Copy a run's records from `records_folder` to its URL, if it has one.

    Args:
        config: Names the URL.
        run_id: The run.
        failed: Whether the run ends with an error: rank 0's journal may not have been fetched then, and stays. What it
            holds that was delivered already is delivered again, which is harmless.

    Raises:
        OSError: What has arrived differs.
        StorageError: The storage cannot be used.
    """
    place = run_place(config, run_id)
    if isinstance(place, RemotePath):
        mirrors = driver_journal(Path()) if failed else journals(Path())
        publish(records_folder(config.training.output) / run_id, place, mirrors=str(mirrors))


def fetch_rank_journal(place: AnyPath, folder: Path) -> None:
    """Take what rank 0 has left of its journal at a run's URL, which it alone writes, into the run's local folder."""
    if isinstance(place, RemotePath):
        journal = rank_journal(folder)
        shutil.rmtree(journal, ignore_errors=True)
        fetch(_remote_journal(place), journal)


class RankJournal:
    """The folder of rank 0's journal on its own host, and where a copy of it is kept."""

    def __init__(self, checkpoints: AnyPath) -> None:
        """Take what an earlier process has left there.

        Args:
            checkpoints: Folder or URL of the run's checkpoints.
        """
        self._copy: RemotePath | None = None
        if isinstance(checkpoints, RemotePath):
            self._copy = _remote_journal(checkpoints.parent)
            self.folder = Path(tempfile.mkdtemp(prefix="groundswell-journal-"), "rank-0")
            register(shutil.rmtree, self.folder.parent, ignore_errors=True)
            fetch(self._copy, self.folder)
        else:
            self.folder = rank_journal(checkpoints.parent)

    def publish(self) -> None:
        """Bring the copy up to date, if there is one: before a checkpoint, so that its records are as safe as it is."""
        if self._copy is not None:
            publish(self.folder, self._copy)


def _remote_journal(place: RemotePath) -> RemotePath:
    return place / str(rank_journal(Path()))


@cache
def _temporary(url: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="groundswell-output-"))
    register(shutil.rmtree, folder, ignore_errors=True)
    return folder
