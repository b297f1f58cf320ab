"""Allows one job at a time to write a dataset."""

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pipelines.storage.folder import Location
from pipelines.storage.lease import PROGRESS_FOLDER, check_held, lease
from pipelines.storage.whole_files import NO_LOCKS, is_open_at, refuse_link, remove_if_empty


def followed(folder: Location) -> Location:
    """Return the folder that a symbolic link refers to: its neighbours are on the same disk."""
    return Location(str(folder.path.resolve())) if folder.is_local and folder.path.is_symlink() else folder


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
            yield lambda: check_held(dataset, PROGRESS_FOLDER)
        return
    dataset = followed(dataset)
    path = dataset.path.with_name(f".{dataset.name}.incomplete.lock")
    absent = [parent for parent in path.parents if not parent.exists()]
    try:
        yield from _hold_local(path, dataset)
    finally:
        for parent in absent:
            remove_if_empty(parent)


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


def _hold_local(path: Path, dataset: Location) -> Iterator[Callable[[], None]]:
    lock = _take(path, dataset)
    if lock is None:
        parent, inside = Location(str(path.parent)), f".{dataset.name}.incomplete.lease"
        parent.make(inside)
        try:
            with lease(parent, inside, dataset):
                yield lambda: check_held(parent, inside, dataset)
        finally:
            remove_if_empty(path.parent / inside)  # unless it holds another job's lease
        return
    with lock:
        try:
            yield lambda: None
        finally:
            # Removed while locked: a process that waits for the lock sees that the file is deleted and makes a new one.
            path.unlink(missing_ok=True)


def _take(path: Path, dataset: Location) -> IO[str] | None:
    """Lock the file; return None if the file system has no locks."""
    refuse_link(path, "unfinished dataset")
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = path.open("w")
        except FileNotFoundError:  # a failed job has removed the folder that it had made
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
