"""Follows links in an archive's folders, so that nothing outside its root is read."""

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from pipelines.archives.files import is_plain_name
from pipelines.storage.folder import Location
from pipelines.storage.locations import is_url


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
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.isascii():
                    continue
                if leaves or (entry.is_symlink() and not stays_inside(root, entry.path)):
                    leading_out.append(prefix + entry.name)
                elif entry.is_dir():
                    inside.append(prefix + entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    return inside, leading_out
