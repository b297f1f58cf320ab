"""Access to files of an archive, on local disks or behind a URL.

Local files are opened by the modules that read them, which guard against links and pipes (`geotiff`). This module
resolves paths, reads remote files, and follows links in an archive's folders, so that nothing outside its root is read.
An unreachable storage is an error of the whole task. Only a missing file is a bad record.
"""

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from os import PathLike, fspath
from pathlib import Path

import pyarrow as pa

from pipelines.archives.archive import BadRecordError
from pipelines.storage.folder import Location, StorageError
from pipelines.storage.locations import is_url

MISSING_FILE = "missing file"
ODD_NAME = "name is no plain file name"

# Many threads read files of a remote archive, but warning filters belong to the process.
DECODING = threading.RLock()

_LARGEST_FILE = 1 << 28  # bytes; a remote file is read into memory as a whole


def join(root: str | PathLike[str], path: str) -> str:
    """Join the archive's root and a path in the archive.

    Raises:
        ValueError: `path` is absolute or leads upwards.
    """
    # Two dots within a name are harmless.
    if "\\" in path or path.startswith("/") or (".." in path and ".." in path.split("/")):
        raise ValueError(f"{path!r} is no path within the archive {fspath(root)}")
    return f"{fspath(root).rstrip('/')}/{path}" if path else fspath(root)


def is_plain_name(name: str) -> bool:
    """Return whether a listed name is a plain file or folder name, on every system and behind every URL."""
    return name not in ("", ".", "..") and not any(letter in "/\\" or ord(letter) < 32 for letter in name)


def stays_inside(root: str, path: str) -> bool:
    """Return whether `path`, with every symbolic link followed, exists below `root`."""
    try:
        return Path(path).resolve(strict=True).is_relative_to(Path(root).resolve())
    except (OSError, RuntimeError):  # the link leads nowhere, or in a circle
        return False


def refuse_link(root: str, path: str) -> None:
    """Refuse a folder of an archive that is a symbolic link to something outside `root`.

    Raises:
        ValueError: The folder is such a link.
    """
    if not is_url(root) and Path(path).is_symlink() and not stays_inside(root, path):
        raise ValueError(f"{path}: a symbolic link out of the archive; move the folder into it, or mount it there")


def list_subfolders(root: str, folders: Iterable[str]) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """List the folders in some folders of an archive, with one system call for many entries instead of one each.

    Args:
        root: Path of the archive.
        folders: Paths relative to the root, `.` for the archive itself; a missing folder counts as empty.

    Returns:
        Paths relative to the root, `<folder>/<name>`: the folders, and the symbolic links out of the archive. Names
        beyond ASCII are left out, because no sample has one.
    """
    # A name takes 100 bytes as a Python string and 60 in an array.
    listed = [[pa.array(names, pa.string()) for names in _subfolders(root, folder)] for folder in folders]
    inside, leading_out = (pa.chunked_array([both[place] for both in listed], pa.string()) for place in (0, 1))
    return inside, leading_out


def _subfolders(root: str, folder: str) -> tuple[list[str], list[str]]:
    prefix = "" if folder == "." else f"{folder}/"
    if is_url(root):
        names = [name for name, is_folder, _ in Location(root.rstrip("/")).entries(prefix.rstrip("/")) if is_folder]
        return [prefix + name for name in names if name.isascii() and is_plain_name(name)], []
    path = Path(root, folder)
    leaves = path.is_symlink() and not stays_inside(root, str(path))
    inside, leading_out = [], []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if not entry.name.isascii():
                continue
            if leaves or (entry.is_symlink() and not stays_inside(root, entry.path)):
                leading_out.append(prefix + entry.name)
            elif entry.is_dir():
                inside.append(prefix + entry.name)
    return inside, leading_out


def refuse_outage(path: str, error: BaseException) -> None:
    """Distinguish a failed remote storage from a file with unexpected content: pyarrow's errors have no number.

    Args:
        path: Path or URL of the file.
        error: Error that reading the file raised.

    Raises:
        StorageError: The storage failed, so the file may be good.
    """
    has_number = isinstance(error, OSError) and error.errno is not None
    if is_url(path) and (has_number or isinstance(error, TimeoutError | PermissionError)):
        raise StorageError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def whole_remote(path: str, data: bytes | None = None) -> bytes | None:
    """Read all bytes of a file behind a URL; None for a local file, which is opened by its path.

    Args:
        path: Path or URL.
        data: All bytes, if they were already read.

    Raises:
        BadRecordError: The file is missing or too large.
    """
    if not is_url(path):
        return None
    if data is None:
        data = read_remote(path, _LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise BadRecordError(path, "file too large", f"more than {_LARGEST_FILE} bytes")
    return data


def read_remote(path: str, limit: int) -> bytes:
    """Read at most the first `limit` bytes of a file behind a URL.

    Raises:
        BadRecordError: The file is missing.
    """
    folder, _, name = path.rpartition("/")
    try:
        return _folder(folder).read_start(name, limit)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise BadRecordError(path, MISSING_FILE, "no such object") from error


_folder = lru_cache(4096)(Location)
# Not `Location.at`: the archive's root is already absolute, and its names may contain a `$`. Finding the file system of
# a URL takes 0.1 ms.
