"""Exchanges the names of two local folders, so that both names exist at every moment."""

import ctypes
import errno
import os
from pathlib import Path

_AT_CURRENT_FOLDER = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def swap_folders(first: Path, second: Path, aside: Path) -> None:
    """Exchange two folders; if the file system cannot, move `second` to `aside` and give its name to `first`.

    Args:
        first: One folder.
        second: The other.
        aside: A free name in the folder of `second`.

    Raises:
        OSError: The folders cannot be renamed.

    Source: renameat2(2) of Linux, flag RENAME_EXCHANGE.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # another C library
        _rename_both(first, second, aside)
        return
    paths = os.fsencode(first), os.fsencode(second)
    if rename(_AT_CURRENT_FOLDER, paths[0], _AT_CURRENT_FOLDER, paths[1], _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in _UNSUPPORTED:
        raise OSError(number, os.strerror(number), str(first), None, str(second))
    _rename_both(first, second, aside)


def _rename_both(first: Path, second: Path, aside: Path) -> None:
    second.rename(aside)
    first.rename(second)
