"""Errors of the disk that a dataset is written to, as one line that says how to continue."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.storage import Folder


@contextmanager
def disk_errors(dataset: Folder) -> Iterator[None]:
    """Say which folder cannot be written, and how to continue.

    Raises:
        RuntimeError: The disk is full.
        ValueError: The folder cannot be written, for lack of permission.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or dataset
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RuntimeError(
                f"{where}: {error.strerror}: make room on the disk of {dataset}; finished shards are kept, and the "
                "same command continues"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise ValueError(
                f"{dataset} cannot be written ({where}: {error.strerror}): choose another dataset.path, or change its "
                "permissions"
            ) from error
        raise
