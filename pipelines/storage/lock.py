"""One job at a time writes a dataset."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pipelines.storage.folder import Folder
from pipelines.storage.lease import PROGRESS_FOLDER, check_held, lease
from pipelines.storage.whole_files import NO_LOCKS


def followed(folder: Folder) -> Folder:
    """Give the folder that a symbolic link leads to: its neighbours are on the same disk."""
    return Folder(str(folder.path.resolve())) if folder.is_local and folder.path.is_symlink() else folder


@contextmanager
def hold(dataset: Folder) -> Iterator[Callable[[], None]]:
    """Hold a dataset for writing; yields a function that raises RuntimeError where another job has taken it over.

    On local disks this is a locked file beside the dataset. Behind a URL, and where files cannot be locked, it is a
    lease that its owner keeps fresh. A folder is the same one by every link that leads to it.

    Raises:
        RuntimeError: Another job is writing the dataset.
    """
    if not dataset.is_local:
        with lease(dataset, PROGRESS_FOLDER):
            yield lambda: check_held(dataset, PROGRESS_FOLDER)
        return
    dataset = followed(dataset)
    path = dataset.path.with_name(f".{dataset.name}.incomplete.lock")
    with _parents(path):
        yield from _hold_local(path, dataset)


def _hold_local(path: Path, dataset: Folder) -> Iterator[Callable[[], None]]:
    lock = _take(path, dataset)
    if lock is None:
        parent, inside = Folder(str(path.parent)), f".{dataset.name}.incomplete.lease"
        parent.make(inside)
        try:
            with lease(parent, inside):
                yield lambda: check_held(parent, inside)
        finally:
            with suppress(OSError):  # another job's lease is in it
                (path.parent / inside).rmdir()
        return
    with lock:
        try:
            yield lambda: None
        finally:
            # Removed while it is locked: who waits for this file finds that its name is gone, and makes another.
            path.unlink(missing_ok=True)


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the folders on the way to a file; those in which nothing was written are removed again."""
    absent = [parent for parent in path.parents if not parent.exists()]
    try:
        yield
    finally:
        for parent in absent:
            with suppress(OSError):  # the dataset is in it
                parent.rmdir()


def _take(path: Path, dataset: Folder) -> IO[str] | None:
    """Lock the file; None where the file system has no locks."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = path.open("w")
        except FileNotFoundError:  # a job that failed has removed the folder that it had made
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
        if _is_at(lock, path):
            return lock
        lock.close()  # the job that held it has removed it


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
