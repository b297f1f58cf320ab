"""Converts disk errors on writing into one line that says how to continue."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.storage.folder import Location


@contextmanager
def disk_errors(folder: Location, argument: str = "dataset.path") -> Iterator[None]:
    """Name the folder that cannot be written, and say how to continue.

    Args:
        folder: Folder that is written to.
        argument: Name of the argument that chooses the folder, for the message.

    Raises:
        RuntimeError: The disk is full.
        ValueError: The permission to write the folder is missing.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RuntimeError(
                f"{where}: {error.strerror}: make room on the disk of {folder}; finished shards are kept, and the "
                "same command continues"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise ValueError(
                f"{folder} cannot be written ({where}: {error.strerror}): choose another {argument}, or change its "
                "permissions"
            ) from error
        raise
