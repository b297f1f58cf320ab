"""Access to the files of an archive, on local disks or behind a URL.

Local files are opened by the modules that read them, which guard against links and pipes (`paths`, `geotiff`). This
module resolves paths and reads remote files. An unreachable storage is an error of the whole task. Only a missing
file is a bad record.
"""

import threading
from functools import lru_cache
from os import PathLike, fspath

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
