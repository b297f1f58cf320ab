"""The runs behind a URL that the store lacks or has in part: functions to find, complete and rename them."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipelines.storage.copies import publish
from pipelines.storage.folder import Location
from pipelines.storage.lease import LEASE_PREFIX
from pipelines.storage.locations import is_inside
from pipelines.tracking.journal.journal import journals
from pipelines.tracking.journal.local_run import FILE_NAME, LOCK_NAME, read_local_run
from pipelines.tracking.journal.sync import Synced, adopt, lacks_something, sync
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.driver.output import CHECKPOINTS, local_records, locked_run

_JOURNALS = str(journals(Path()))


def unsynced_behind(output: Location) -> list[Location]:
    """Return the runs behind a URL that the store lacks or has in part, in the order of their names.

    Raises:
        StorageError: The storage cannot be used.
    """
    output.check()
    return [output / name for name in output.names() if is_inside(name) and _lacks_something(output / name)]


def sync_behind(location: Location, log_model: Callable[[Path, TrackedRun, None, Location], str]) -> Synced:
    """Write everything of one run that the store lacks; see `pipelines.tracking.journal.sync.sync`.

    Args:
        location: The run's URL. The run is renamed there to the store's identifier.
        log_model: Logs the model of a finished training. It takes the run's folder on this machine, the run, None for
            the checkpoint of the best epoch or the newest, and the checkpoints' folder.

    Raises:
        RunLockedError, ValueError, TrackingError: See `pipelines.tracking.journal.sync.sync`.
        StorageError: The storage cannot be used.
    """
    with locked_run(location):
        folder = local_records(location)
        synced = sync(folder, lambda folder, run: log_model(folder, run, None, location / CHECKPOINTS))
        _publish_as(synced.run_id, synced.folder, location)
    return synced


def adopt_behind(location: Location) -> str:
    """Add a run to a store that lacks it, rename it to the store's identifier and return this identifier.

    Raises:
        ValueError, TrackingError: See `pipelines.tracking.journal.sync.adopt`.
        StorageError: The storage cannot be used.
    """
    with locked_run(location):
        folder = local_records(location)
        local = read_local_run(folder)
        if local is None or (local.is_stored and local.run_id == location.name):
            return location.name
        run, folder = adopt(folder)
        _publish_as(run.run_id, folder, location)
    return run.run_id


def _lacks_something(location: Location) -> bool:
    names = location.names()
    if FILE_NAME not in names:
        return _JOURNALS in names  # records of a run whose file is lost, which `sync` reports; else no run
    with tempfile.TemporaryDirectory(prefix="groundswell-") as parent:
        folder = Path(parent, location.name)
        folder.mkdir()
        (folder / FILE_NAME).write_bytes(location.read(FILE_NAME))
        if _JOURNALS in names:
            (folder / _JOURNALS).mkdir()
        return lacks_something(folder)


def _publish_as(run_id: str, folder: Path, location: Location) -> None:
    """Copy the records back and rename everything behind the URL; a repeated call continues an interrupted one."""
    (folder / LOCK_NAME).unlink(missing_ok=True)  # this lock is only for the copy on this machine
    publish(folder, location, mirrors=_JOURNALS)
    if run_id == location.name:
        return
    target = location.parent / run_id
    moved = [name for name in location.files() if not name.rpartition("/")[2].startswith(LEASE_PREFIX)]
    with tempfile.TemporaryDirectory(prefix="groundswell-") as copies:
        for name in moved:
            copy = Path(copies, "file")
            with location.open(name) as stream, copy.open("wb") as file:
                shutil.copyfileobj(stream, file)
            target.put(copy, name)
    for name in sorted(moved, key=lambda name: name == FILE_NAME):  # last, the file that makes the folder a run
        location.remove(name)
