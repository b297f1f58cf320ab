"""A file or folder behind a URL with those of `pathlib.Path`'s methods that whole files need."""

import fnmatch
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.storage.folder import Folder
from pipelines.storage.locations import is_url


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder behind a URL: files are written whole, read at any place, listed and removed."""

    url: str
    """`scheme://...` without a slash at its end."""

    def __str__(self) -> str:
        """Return the URL."""
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        """Give what has this name, or path, below."""
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its last ending."""
        return Path(self.name).stem

    @property
    def parent(self) -> "RemotePath":
        """The folder that holds it."""
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def folder(self) -> Folder:
        """The same as a folder."""
        return Folder(self.url)

    def with_name(self, name: str) -> "RemotePath":
        """Give what is beside it."""
        return self.parent / name

    def is_file(self) -> bool:
        """Tell whether it is a file that exists."""
        return self.size() is not None

    def is_dir(self) -> bool:
        """Tell whether it is a folder with content."""
        return bool(self.folder.names())

    def size(self) -> int | None:
        """Give the bytes of a file; None where there is none."""
        return self.parent.folder.size(self.name)

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Give what the folder holds of this pattern."""
        return (self / name for name in self.folder.names() if fnmatch.fnmatchcase(name, pattern))

    def open(self, mode: Literal["rb"] = "rb") -> Any:
        """Open a file for reading at any place."""
        return self.parent.folder.open(self.name)

    def put(self, file: Path) -> None:
        """Make a file whole from a local one, and compare what has arrived.

        Raises:
            OSError: What has arrived differs; nothing is left of it.
            StorageError: The storage cannot be used.
        """
        self.parent.folder.put(file, self.name)

    def touch(self) -> None:
        """Make an empty file."""
        self.parent.folder.write(self.name, b"")

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Make the folder, if the storage has folders."""
        assert parents, "an object store has no folders to miss"
        assert exist_ok, "an object store has no folders to find"
        self.folder.make()

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: There is none.
        """
        if not missing_ok and not self.is_file():
            raise FileNotFoundError(self.url)
        self.parent.folder.remove(self.name)


AnyPath = Path | RemotePath
"""A file or folder, of this machine or behind a URL."""


def any_path(location: str) -> AnyPath:
    """Give the path of an absolute location."""
    return RemotePath(location) if is_url(location) else Path(location)


def fetch(source: RemotePath, target: Path, *, without: str = "") -> None:
    """Copy all files below a remote folder, if there are any, to a local one.

    Args:
        source: The remote folder.
        target: The local one; files of the same names are replaced.
        without: Name of a folder in it that is left out.
    """
    folder = source.folder
    for name in folder.files():
        if not without or not name.startswith(f"{without}/"):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with folder.open(name) as stream, path.open("wb") as file:
                shutil.copyfileobj(stream, file)


def publish(source: Path, target: RemotePath, *, mirrors: str = "") -> None:
    """Copy the files of a local folder, as they are now, to a remote one.

    Args:
        source: The local folder, which may be absent.
        target: The remote folder.
        mirrors: Name of a folder in it that is all ours: files there that the local one lacks are removed. Empty: the
            whole remote folder is. What others have put beside it stays.

    Raises:
        OSError: What has arrived differs.
        StorageError: The storage cannot be used.
    """
    folder = target.folder
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    for name in folder.files():
        if name not in ours and (not mirrors or name.startswith(f"{mirrors}/")):
            folder.remove(name)
    with tempfile.TemporaryDirectory(prefix="groundswell-") as copies:
        copy = Path(copies, "file")
        for name in sorted(ours):
            with suppress(FileNotFoundError):  # a thread has delivered it meanwhile
                shutil.copyfile(source / name, copy)
                folder.put(copy, name)
