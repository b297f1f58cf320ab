"""Later writes of data that a training could not write to the store: run, records, model and status."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.storage.locations import inside, redacted
from pipelines.storage.whole_files import remove_if_empty
from pipelines.tracking.journal.journal import journals
from pipelines.tracking.journal.local_run import FILE_NAME, LocalRun, is_locked, locked, read_local_run
from pipelines.tracking.journal.writer import RunWriter, now
from pipelines.tracking.store import runs
from pipelines.tracking.store.runs import Status
from pipelines.tracking.store.store import TrackedRun, TrackingError, tracking_uri

DRIVER_DIED = {"driver": "died before it could end this run"}
"""Tags of a run that nobody ended."""
_ENDED: dict[str, Status] = {"TRAINED": "FINISHED", "FINISHED": "FINISHED", "FAILED": "FAILED", "KILLED": "KILLED"}


@dataclass(frozen=True)
class Synced:
    """The result of the sync of one run."""

    run_id: str
    folder: Path
    status: str
    model_uri: str
    """The URI of the run's model, if this call has logged it."""
    waiting: int
    """Number of entries about steps that no checkpoint contains: a resumed run repeats these steps."""


def unsynced(output: Path) -> list[Path]:
    """Return the folders of runs under `output` that are not completely in the store, sorted by name.

    Runs in training are left out if files can be locked.
    """
    return [folder for folder in sorted(_folders(output)) if lacks_something(folder) and not is_locked(folder)]


def sync(
    folder: Path,
    log_model: Callable[[Path, TrackedRun], str],
    *,
    lock: Callable[[Path], AbstractContextManager[object]] = locked,
) -> Synced:
    """Write everything of one run that is not in the store yet.

    Args:
        folder: The run's folder. It gets the store's identifier as its name; the old name stays as a link.
        log_model: Logs the model of the newest checkpoint in the folder of a finished training, and returns its URI.
        lock: Prevents other processes from training or writing the run during this call.

    Raises:
        RunLockedError: The run is being trained.
        ValueError: The folder has no run, the run is no longer in the store, or the folder is a copy of another folder
            beside it.
        TrackingError: The store does not answer, or refuses the data.
    """
    with lock(folder):
        local = read_local_run(folder)
        if local is None:
            raise ValueError(f"{folder} has no {FILE_NAME}, as every run's folder has: train again")
        if (original := _original_of(folder, local)) is not None:
            raise ValueError(f"{folder} is a copy of {original}, which has the newer records: give that one")
        run = _stored(folder, local)
        if not runs.is_known(run.run_id):  # otherwise the store would refuse every write for good
            raise ValueError(
                f"{redacted(run.uri)} shows no run {run.run_id}: it is in another store than MLFLOW_TRACKING_URI "
                "names, was deleted, or is not yours to see; all records are kept"
            )
        waiting = _deliver(run, folder)
        model_uri = ""
        if local.status == "TRAINED":
            try:
                model_uri = log_model(folder, run)
            except BaseException:
                runs.end_failed_run(run, "FAILED")  # until a later call logs the model
                raise
        status = _end(run, folder)
        folder = _named_after(run, folder)
    return Synced(run.run_id, folder, status, model_uri, waiting)


def adopt(folder: Path) -> tuple[TrackedRun, Path]:
    """Create a run in the store if it is not there, and return the run and its folder.

    Raises:
        ValueError, TrackingError: The same as in `runs.start_run`.
    """
    local = read_local_run(folder)
    assert local is not None, folder
    run = _stored(folder, local)
    return run, _named_after(run, folder)


def _stored(folder: Path, local: LocalRun) -> TrackedRun:
    """Return the run in the store, and create it there if it is missing."""
    if local.is_stored:
        return TrackedRun(tracking_uri(), local.run_id)
    run = runs.store_run(local)
    inside(run.run_id, folder.parent)
    replace(local, run_id=run.run_id, is_stored=True).write(folder)
    return run


def _original_of(folder: Path, local: LocalRun) -> Path | None:
    """Return the original of a copied folder: the one beside it with the run's name; None: it is no copy."""
    if folder.name == local.run_id:
        return None
    named = folder.with_name(local.run_id)
    is_run = (named / FILE_NAME).is_file() and named.resolve() != folder.resolve()
    return named if is_run else None


def _named_after(run: TrackedRun, folder: Path) -> Path:
    """Rename the folder of a run to the store's identifier; the old name stays as a link."""
    before = folder.resolve()
    named = before.with_name(run.run_id)
    if not named.exists():
        before.rename(named)
        with suppress(OSError):  # storage without links
            before.symlink_to(named.name)
    return named


def _deliver(run: TrackedRun, folder: Path) -> int:
    """Deliver all journals of a run; return the number of entries that wait for a checkpoint."""
    waiting = 0
    for journal in sorted(path for path in journals(folder).glob("*") if path.is_dir()):
        with closing(RunWriter(run, journal)) as writer:
            reason = writer.drain()
            if reason:
                raise TrackingError(f"MLflow does not take what {journal} holds: {reason}")
            waiting += writer.pending
    remove_if_empty(journals(folder))
    return waiting


def _end(run: TrackedRun, folder: Path) -> str:
    local = read_local_run(folder)
    assert local is not None, folder
    if local.status == "RUNNING":
        runs.set_tags(run, DRIVER_DIED)
        local = replace(local, status="FAILED", ended=now())
    status = _ENDED[local.status]
    runs.end_run(run, status, local.ended)
    replace(local, status=status, is_reported=True).write(folder)
    return status


def _folders(output: Path) -> Iterator[Path]:
    if not output.is_dir():
        raise ValueError(f"there is no folder {output}: give the training.output of the runs by --output")
    for folder in output.iterdir():
        with suppress(OSError):  # a folder of another user, such as `lost+found`
            if not folder.is_symlink() and ((folder / FILE_NAME).is_file() or journals(folder).is_dir()):
                yield folder


def lacks_something(folder: Path) -> bool:
    """Return whether a run's folder has data that is not in the store; a copy of a run lacks nothing."""
    try:
        local = read_local_run(folder)
    except (ValueError, OSError):  # `sync` reports it
        return True
    if local is None:  # its file is lost: `sync` reports the records that wait
        return journals(folder).is_dir()
    if _original_of(folder, local) is not None:
        return False
    done = local.is_stored and local.is_reported and local.run_id == folder.name
    return not done or journals(folder).is_dir()
