"""Lists archives with one folder per class safely: the class folders, below split folders or at the top, and files."""

import os
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.archives.archive import INDEX_SCHEMA, REJECTED_SCHEMA, ArchiveIndex, index_table
from pipelines.archives.files import ODD_NAME, is_plain_name, join, stays_inside
from pipelines.sample import SPLITS, TEST_SPLIT, TRAINING_SPLIT, VALIDATION_SPLIT
from pipelines.storage.folder import Location
from pipelines.storage.locations import is_url

SYMBOLIC_LINK = "symbolic link"
SPLIT_OF_NAME = {
    "train": TRAINING_SPLIT,
    "val": VALIDATION_SPLIT,
    "valid": VALIDATION_SPLIT,
    "validation": VALIDATION_SPLIT,
    "test": TEST_SPLIT,
}


@dataclass(frozen=True)
class FolderContents:
    """Content of one folder, by name."""

    folders: list[str]
    files: list[tuple[str, int]]
    """Name and size in bytes of each file."""
    rejected: list[dict[str, str]]
    """Rows of `REJECTED_SCHEMA`."""


@dataclass(frozen=True)
class ClassFiles:
    """The files of many class folders, folder by folder, each sorted by name."""

    paths: pa.StringArray
    """Paths relative to the archive's root, `<folder>/<name>`, which are also the samples' ids."""
    folders: NDArray[np.int32]
    """Position of each file's folder in the list of folders."""
    sizes: NDArray[np.int64]
    """Size of each file in bytes."""
    rejected: list[dict[str, str]]
    """Rows of `REJECTED_SCHEMA`."""


@dataclass(frozen=True)
class ClassTree:
    """Class folders, train first, and the split of each."""

    folders: list[str]
    """Folders relative to the root: `train/cat`, or `cat`."""
    splits: list[str | None]
    """Split of each folder; None if the archive has no splits."""
    rejected: list[dict[str, str]]
    """Rows of `REJECTED_SCHEMA`."""


def list_folder(root: str, folder: str = "") -> FolderContents:
    """List one folder of an archive.

    Names that start with a dot are skipped. A symbolic link that leads out of the archive or nowhere, a device or
    pipe, and a name that is not UTF-8 are rejected. So every listed name is a plain file or folder below `root`.

    Args:
        root: Path or URL of the archive.
        folder: Path relative to the root.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    if is_url(root):
        return _list_remote_folder(root, folder)
    folders: list[str] = []
    files: list[tuple[str, int]] = []
    rejected: list[dict[str, str]] = []
    path = Path(root, folder)
    try:
        scanned = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: no such folder, expected the archive with its class folders") from None
    with scanned as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            inner = f"{folder}/{name}" if folder else name
            if name.encode(errors="ignore").decode() != name:  # Python represents other bytes as lone surrogates
                rejected.append(rejection(root, inner, "name is not UTF-8"))
            elif not is_plain_name(name):
                rejected.append(rejection(root, inner, ODD_NAME))
            elif entry.is_symlink() and not stays_inside(root, entry.path):
                rejected.append(rejection(root, inner, SYMBOLIC_LINK, f"to {Path(entry.path).readlink()}"))
            elif entry.is_dir():
                folders.append(name)
            elif entry.is_file():
                files.append((name, entry.stat().st_size))
            else:
                rejected.append(rejection(root, inner, "not a regular file"))
    return FolderContents(sorted(folders), sorted(files), sorted(rejected, key=lambda row: row["id"]))


def refuse_linked_folders(root: str, rejected: Sequence[dict[str, str]]) -> None:
    """Refuse rejected links to folders outside the archive, because each of them would hide many samples.

    Args:
        root: Path or URL of the archive.
        rejected: Rows of `FolderContents.rejected`.

    Raises:
        ValueError: A rejected record is such a link.
    """
    for row in rejected:
        if row["reason"] == SYMBOLIC_LINK and Path(root, row["id"]).is_dir():
            raise ValueError(
                f"{join(root, row['id'])}: a symbolic link {row['detail']}, out of the archive: move the folder into "
                "it, or mount it there"
            )


def _list_remote_folder(root: str, folder: str) -> FolderContents:
    """List a folder of an object store, which has no links or pipes, but whose names may contain anything."""
    found = Location(root.rstrip("/")).entries(folder)
    entries = [entry for entry in found if entry[0] == ".." or not entry[0].startswith(".")]
    if not found:
        raise FileNotFoundError(f"{join(root, folder)}: no such folder, expected the archive with its class folders")
    bad = [name for name, _, _ in entries if not is_plain_name(name)]
    prefix = f"{folder}/" if folder else ""
    return FolderContents(
        sorted(name for name, is_folder, _ in entries if is_folder and name not in bad),
        sorted((name, size) for name, is_folder, size in entries if not is_folder and name not in bad),
        [rejection(root, f"{prefix}{name}", ODD_NAME) for name in sorted(bad)],
    )


def list_class_files(root: str, folders: Sequence[str], why_not: Callable[[str, str], str | None]) -> ClassFiles:
    """List the files of class folders; subfolders are rejected, not searched.

    Args:
        root: Path or URL of the archive.
        folders: Paths relative to the root; their order is kept.
        why_not: Function from folder and file name to the reason for rejecting the file, or None.
    """
    paths: list[pa.Array] = [pa.array([], pa.string())]
    sizes: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    rejected: list[dict[str, str]] = []
    for folder in folders:
        contents = list_folder(root, folder)
        reasons = [why_not(folder, name) for name, _ in contents.files]
        named = [
            *((name, reason) for (name, _), reason in zip(contents.files, reasons, strict=True) if reason),
            *((name, "nested folder") for name in contents.folders),
        ]
        rejected += contents.rejected + [rejection(root, f"{folder}/{name}", reason) for name, reason in named]
        taken = [file for file, reason in zip(contents.files, reasons, strict=True) if not reason]
        # Arrow and numpy hold a million names in a quarter of the memory of Python's lists.
        paths.append(pa.array([f"{folder}/{name}" for name, _ in taken], pa.string()))
        sizes.append(np.array([size for _, size in taken], np.int64))
    positions = np.repeat(np.arange(len(folders), dtype=np.int32), [len(array) for array in paths[1:]])
    return ClassFiles(pa.concat_arrays(paths), positions, np.concatenate(sizes), rejected)


def rejection(root: str, path: str, reason: str, detail: str = "") -> dict[str, str]:
    """Build a row of `REJECTED_SCHEMA` for a file or folder `path` relative to `root`."""
    texts = {"id": path, "file": f"{root.rstrip('/')}/{path}", "reason": reason, "detail": detail}
    return {name: os.fsencode(text).decode("utf-8", "backslashreplace") for name, text in texts.items()}


def check_none_empty(root: str, folders: Sequence[str], files: ClassFiles) -> None:
    """Raise ValueError if one of the first folders has no file at all, because nothing can be learned of its class."""
    counts = np.bincount(files.folders, minlength=len(folders))
    empty = [folder for position, folder in enumerate(folders) if counts[position] == 0]
    if empty:
        inside = [row for row in files.rejected if row["id"].startswith(f"{empty[0]}/")]
        found = f", which has {len(inside)} others ({inside[0]['id']}: {inside[0]['reason']})" if inside else ""
        raise ValueError(
            f"{root}: {len(empty)} class folders hold no images, the first is {empty[0]!r}{found}; "
            "extract the whole archive, or remove the folder"
        )


def index_of(files: ClassFiles, splits: NDArray[np.str_], labels: NDArray[np.integer[Any]]) -> ArchiveIndex:
    """Build an index in which every sample is one file of one class, named by its path."""
    offsets = np.arange(len(files.paths) + 1, dtype=np.int32)
    classes = pa.array(labels, pa.int16())
    samples = index_table(
        {
            "id": files.paths,
            "split": pa.array(splits, pa.string()),
            "labels": pa.ListArray.from_arrays(offsets, classes, type=INDEX_SCHEMA.field("labels").type),
            "paths": pa.ListArray.from_arrays(offsets, files.paths, type=INDEX_SCHEMA.field("paths").type),
            "size": pa.array(files.sizes),
        }
    )
    return ArchiveIndex(samples, pa.Table.from_pylist(files.rejected, REJECTED_SCHEMA))


def class_name(folder: str) -> str:
    """Return the class of a folder: its name, in the spelling of Unicode (NFC) that most systems write."""
    return unicodedata.normalize("NFC", folder.rpartition("/")[2])


def _refuse_two_spellings(root: str, folders: Sequence[str]) -> None:
    spellings: dict[str, str] = {}
    for folder in folders:
        if (other := spellings.setdefault(class_name(folder), folder)) != folder:
            raise ValueError(f"{root}: {other!a} and {folder!a} are one name in two spellings of Unicode: rename one")


def find_class_folders(root: str, is_image: Callable[[str], bool]) -> ClassTree:
    """Find the class folders of `train/<class>` and the other splits, or of `<class>`.

    Files beside class folders are no samples; images among them are rejected.

    Args:
        root: Path or URL of the archive.
        is_image: Function that decides by a file's name whether it is an image.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: It has no class folders, or splits are mixed with classes. The split train is missing, or a split
            exists twice. A class of another split is not in train. A folder is a link out of the archive.
    """
    top = list_folder(root)
    inside = {name: list_folder(root, name) for name in top.folders if name.lower() in SPLIT_OF_NAME}
    for contents in (top, *inside.values()):
        refuse_linked_folders(root, contents.rejected)
        _refuse_two_spellings(root, contents.folders)
    rejected = top.rejected + [
        rejection(root, name, "not in a class folder") for name, _ in top.files if is_image(name)
    ]
    # A class may be called `train`: it contains no folders.
    if not any(contents.folders for contents in inside.values()):
        if not top.folders or len(inside) == len(top.folders):
            raise ValueError(f"{root}: holds no class folders, expected <class>/* or train/<class>/*")
        return ClassTree(top.folders, [None] * len(top.folders), rejected)
    if len(inside) < len(top.folders):
        others = [name for name in top.folders if name not in inside]
        raise ValueError(
            f"{root}: holds {others[0]!r} beside {', '.join(inside)}, expected only splits or only classes"
        )
    of_split = {SPLIT_OF_NAME[name.lower()]: name for name in inside}
    if len(of_split) < len(inside) or TRAINING_SPLIT not in of_split:
        raise ValueError(f"{root}: holds {', '.join(inside)}, expected train and at most one each of the other splits")
    folders: list[str] = []
    splits: list[str | None] = []
    for split in (split for split in SPLITS if split in of_split):
        name = of_split[split]
        known = inside[of_split[TRAINING_SPLIT]].folders
        unknown = set(map(class_name, inside[name].folders)) - set(map(class_name, known))
        if unknown:
            raise ValueError(f"{root}: class {min(unknown)!r} is in {name} but not in {of_split[TRAINING_SPLIT]}")
        folders += [f"{name}/{folder}" for folder in inside[name].folders]
        splits += [split] * len(inside[name].folders)
        rejected += inside[name].rejected + [
            rejection(root, f"{name}/{file}", "not in a class folder")
            for file, _ in inside[name].files
            if is_image(file)
        ]
    return ClassTree(folders, splits, rejected)
