"""A file or folder behind a URL with the methods of `pathlib.Path` that whole files need."""

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
    """A file or folder behind a URL: files are written whole, read at any position, listed and removed."""

    url: str
    """`scheme://...` without a slash at its end."""

    def __str__(self) -> str:
        """Return the URL."""
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        """Return the file or folder with this name, or path, below this one."""
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """Name without its last suffix."""
        return Path(self.name).stem

    @property
    def parent(self) -> "RemotePath":
        """Folder that contains this file or folder."""
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def folder(self) -> Folder:
        """The same location as a `Folder`."""
        return Folder(self.url)

    def with_name(self, name: str) -> "RemotePath":
        """Return the file or folder with this name beside this one."""
        return self.parent / name

    def is_file(self) -> bool:
        """Return whether this is an existing file."""
        return self.size() is not None

    def is_dir(self) -> bool:
        """Return whether this is a folder with content."""
        return bool(self.folder.names())

    def size(self) -> int | None:
        """Return the size of the file in bytes; None if it does not exist."""
        return self.parent.folder.size(self.name)

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Return the entries of the folder that match a pattern."""
        return (self / name for name in self.folder.names() if fnmatch.fnmatchcase(name, pattern))

    def open(self, mode: Literal["rb"] = "rb") -> Any:
        """Open the file for reading at any position."""
        return self.parent.folder.open(self.name)

    def put(self, file: Path) -> None:
        """Upload a local file atomically, and check the stored content.

        Raises:
            OSError: The stored content differs; it is removed.
            StorageError: The storage cannot be used.
        """
        self.parent.folder.put(file, self.name)

    def touch(self) -> None:
        """Create an empty file."""
        self.parent.folder.write(self.name, b"")

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Make the folder, if the storage has folders."""
        assert parents, "an object store has no folders to miss"
        assert exist_ok, "an object store has no folders to find"
        self.folder.make()

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        if not missing_ok and not self.is_file():
            raise FileNotFoundError(self.url)
        self.parent.folder.remove(self.name)


AnyPath = Path | RemotePath
"""A local or remote file or folder."""


def any_path(location: str) -> AnyPath:
    """Return the local or remote path of an absolute location."""
    return RemotePath(location) if is_url(location) else Path(location)


def fetch(source: RemotePath, target: Path, *, without: str = "") -> None:
    """Copy all files below a remote folder, if any, to a local one.

    Args:
        source: Remote folder.
        target: Local folder; files with the same names are replaced.
        without: Name of a subfolder to leave out.
    """
    folder = source.folder
    for name in folder.files():
        if not without or not name.startswith(f"{without}/"):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with folder.open(name) as stream, path.open("wb") as file:
                shutil.copyfileobj(stream, file)


def publish(source: Path, target: RemotePath, *, mirrors: str = "") -> None:
    """Copy the current files of a local folder to a remote one.

    Args:
        source: Local folder, which may be missing.
        target: Remote folder.
        mirrors: Name of a subfolder that is all ours: its files without a local counterpart are removed. Empty: this
            applies to the whole remote folder. Files that others put beside it stay.

    Raises:
        OSError: The stored content differs.
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
            with suppress(FileNotFoundError):  # another thread has already delivered it
                shutil.copyfile(source / name, copy)
                folder.put(copy, name)
