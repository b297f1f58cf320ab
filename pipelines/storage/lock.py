"""Allows one job at a time to write a dataset."""

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pipelines.storage.folder import Location, leaving_nothing
from pipelines.storage.lease import PROGRESS_FOLDER, check_owner, lease
from pipelines.storage.whole_files import NO_LOCKS, disk_errors, is_open_at, refuse_link, remove_if_empty


def followed(folder: Location) -> Location:
    """Return the folder that a symbolic link refers to: its neighbours are on the same disk."""
    return Location(str(folder.path.resolve())) if folder.is_local and folder.path.is_symlink() else folder


def check_place(folder: Location, argument: str) -> None:
    """Check early that a local folder, which need not exist yet, can be held and written.

    Args:
        folder: Folder that the job will write.
        argument: Name of the argument that chooses the folder, for the message.

    Raises:
        ValueError: The folder or its neighbours cannot be written there; the message says what lies there.
        RuntimeError: Another job is writing the folder, or its disk is full.
    """
    if folder.is_local:  # elsewhere a lease would cost requests, and says no more than `check`
        with disk_errors(folder, argument), hold(folder):
            pass


@contextmanager
def hold(dataset: Location) -> Iterator[Callable[[], None]]:
    """Hold a dataset for writing; yield a function that raises RuntimeError if another job has taken it over.

    On local disks this is a locked file beside the dataset. Behind a URL, and where files cannot be locked, it is a
    lease that its owner refreshes. All links to a folder share one lock.

    Raises:
        RuntimeError: Another job is writing the dataset.
    """
    if not dataset.is_local:
        with lease(dataset, PROGRESS_FOLDER):
            yield lambda: check_owner(dataset, PROGRESS_FOLDER)
        return
    dataset = followed(dataset)
    path = _beside(dataset, "lock")
    with leaving_nothing(dataset.parent):
        lock = _take(path, dataset)
        if lock is not None:
            with lock:
                try:
                    yield lambda: None
                finally:
                    # Removed while locked: a process that waits for the lock sees that the file is deleted and makes a
                    # new one.
                    path.unlink(missing_ok=True)
            return
        parent, inside = dataset.parent, _beside(dataset, "lease").name
        parent.make(inside)
        try:
            with lease(parent, inside, dataset):
                yield lambda: check_owner(parent, inside, dataset)
        finally:
            remove_if_empty(path.parent / inside)  # unless it holds another job's lease


def _beside(folder: Location, suffix: str) -> Path:
    return folder.path.with_name(f".{folder.name}.incomplete.{suffix}")


def tidy(output: Location, clean_up: Callable[[], object], *, has_leftovers: bool) -> None:
    """Clean up a finished output after killed jobs, unless another job holds it or it may only be read.

    Args:
        output: A dataset, predictions or features.
        clean_up: Removes the leftovers; called while the output is held.
        has_leftovers: Whether there are any in the output. A lock beside it that nobody holds is removed too.
    """
    output = followed(output)
    if has_leftovers or (output.is_local and output.sibling(f".{output.name}.incomplete.lock").exists()):
        with suppress(OSError, RuntimeError), hold(output):
            clean_up()


def _take(path: Path, dataset: Location) -> IO[str] | None:
    """Lock the file; return None if the file system has no locks."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        _beside(dataset, "lease").exists()  # fails for a longer name than the file system has: none beside is longer
        refuse_link(path, "unfinished dataset")
        try:
            lock = path.open("w")
        except FileNotFoundError:
            if path.parent.exists():  # else a failed job has removed the folder that it had made
                raise PermissionError(errno.EACCES, "it takes no files", str(path.parent)) from None
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if error.errno == errno.EWOULDBLOCK:
                raise RuntimeError(f"another job is writing {dataset}: wait for it, or stop it") from None
            if error.errno in NO_LOCKS:
                path.unlink(missing_ok=True)
                return None
            raise
        if is_open_at(lock.fileno(), path):
            return lock
        lock.close()  # the previous holder has removed the file
