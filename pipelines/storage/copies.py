"""Copies the files of a folder to a URL and back."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from pipelines.storage.folder import Location
from pipelines.storage.locations import is_inside


def fetch(source: Location, target: Path, *, without: str = "") -> None:
    """Copy all files below a folder, if any, to a local one.

    Args:
        source: Folder behind a URL.
        target: Local folder; files with the same names are replaced.
        without: Name of a subfolder to leave out.

    Raises:
        ValueError: A file has a name that leads out of its folder, as keys of an object store may have. Nothing is
            copied.
    """
    names = list(source.files())
    for name in names:
        if not is_inside(name):
            raise ValueError(f"{source} has a file {name!r}, whose name leads out of this folder: remove this file")
    for name in names:
        if not without or not name.startswith(f"{without}/"):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with source.open(name) as stream, path.open("wb") as file:
                shutil.copyfileobj(stream, file)


def publish(source: Path, target: Location, *, mirrors: str = "") -> None:
    """Copy the current files of a local folder to a folder behind a URL.

    Args:
        source: Local folder, which may be missing.
        target: Folder behind a URL.
        mirrors: Name of a subfolder that is all ours: its files without a local counterpart are removed. Empty: this
            applies to the whole target. Files that others put beside it stay.

    Raises:
        OSError: The stored content differs.
        StorageError: The storage cannot be used.
    """
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    for name in target.files():
        if name not in ours and (not mirrors or name.startswith(f"{mirrors}/")):
            target.remove(name)
    with tempfile.TemporaryDirectory(prefix="groundswell-") as copies:
        copy = Path(copies, "file")
        for name in sorted(ours):
            with suppress(FileNotFoundError):  # another thread has already delivered it
                shutil.copyfile(source / name, copy)
                target.put(copy, name)
