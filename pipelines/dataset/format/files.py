"""The names of a dataset's files: what is ours, and so may be replaced or removed; nothing else ever is."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from pipelines.dataset.format.manifest import FILE_NAME, Manifest
from pipelines.storage.folder import Folder
from pipelines.storage.lease import LEASE_PREFIX, PROGRESS_FOLDER

REJECTED_FILE = "_rejected.parquet"
"""Readers that search folders for Parquet files pass over names with a leading underscore."""
REPORT_FILE = "report.html"
INDEX_FILE = "_index.parquet"
NOTES_FILE = "_notes.json.gz"
PETASTORM_FILE = "_common_metadata"
MARK_FILE = f"{PROGRESS_FOLDER}/plan.json"

_TOP = (FILE_NAME, REPORT_FILE, REJECTED_FILE, INDEX_FILE, NOTES_FILE)
_SHARD = r"part-[0-9]{5,}\.parquet"
_EARLIER = ".earlier"
_NOTE = rf"[^/]+-{_SHARD}({re.escape(_EARLIER)})?\.json"
_PROGRESS = rf"{PROGRESS_FOLDER}/(plan\.json|{_NOTE}|{LEASE_PREFIX}[0-9a-f]{{32}}\.json)"
# What `Folder.new_file` writes before the file gets its name; an attempt that is killed leaves it behind.
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}")
_REMOVED_AT_ONCE = 16


def shard_name(split: str, number: int) -> str:
    """Give the path of a shard, relative to the dataset."""
    return f"{split}/part-{number:05d}.parquet"


def note_name(shard: str, *, earlier: bool = False) -> str:
    """Give the path of the note that says that a shard is finished, relative to the dataset.

    Args:
        shard: Path of the shard.
        earlier: Whether the note is that of a shard which is being written again.
    """
    return f"{PROGRESS_FOLDER}/{shard.replace('/', '-')}{_EARLIER * earlier}.json"


def notes_in(folder: Folder) -> list[str]:
    """List the notes in the folder of an unfinished dataset, also those whose shard is gone."""
    return [f"{PROGRESS_FOLDER}/{name}" for name in folder.names(PROGRESS_FOLDER) if re.fullmatch(_NOTE, name)]


def files_of_finished(folder: Folder, manifest: Manifest) -> list[str]:
    """List the files in the folder that its `dataset.json` shows to be ours.

    Raises:
        ValueError: There is another file; names it.
    """
    shards = {shard.file for split in manifest.splits.values() for shard in split.shards}
    petastorm = {f"{split}/{PETASTORM_FILE}" for split in manifest.splits}
    return _own_files(folder, lambda name: name in shards or name in petastorm or _is_of_any(name))


def files_of_unfinished(folder: Folder, splits: Collection[str]) -> list[str]:
    """List the files in a folder of unfinished work of these splits, of which our mark tells.

    Raises:
        ValueError: There is another file; names it.
    """
    ours = re.compile(rf"({'|'.join(map(re.escape, splits))})/({_SHARD}|{PETASTORM_FILE})")
    return _own_files(folder, lambda name: bool(splits and ours.fullmatch(name)) or _is_of_any(name))


def is_progress(name: str) -> bool:
    """Tell whether a file, by its path in the dataset, is one that a job keeps only while it runs."""
    return bool(re.fullmatch(_PROGRESS, _final_name(name)))


def _is_of_any(name: str) -> bool:
    return name in _TOP or is_progress(name)


def _own_files(folder: Folder, is_ours: Callable[[str], bool]) -> list[str]:
    names = sorted(folder.files())
    foreign = [name for name in names if not is_ours(_final_name(name))]
    if foreign:
        more = f" and {len(foreign) - 1} more files" if len(foreign) > 1 else ""
        raise ValueError(
            f"{folder} holds {foreign[0]}{more}, which {'are' if more else 'is'} not part of the dataset: "
            "move what is yours elsewhere, or choose another dataset.path; nothing was removed"
        )
    return names


def _final_name(name: str) -> str:
    """The name that a file gets when it is complete."""
    path = PurePosixPath(name)
    match = _TEMPORARY.fullmatch(path.name)
    return str(path.with_name(match[1])) if match else name


def remove_files(folder: Folder, names: Iterable[str], *, last: Collection[str] = ()) -> None:
    """Remove files by name, and the local folders that are empty then.

    Args:
        folder: Folder of the files.
        names: Paths relative to it; those that are gone already are passed over.
        last: Those of the names that must be there as long as any other is: they prove whose files these are.
    """
    names = list(names)
    with ThreadPoolExecutor(1 if folder.is_local else _REMOVED_AT_ONCE) as pool:
        list(pool.map(folder.remove, [name for name in names if name not in last]))
    for name in names:
        if name in last:
            folder.remove(name)
    if folder.is_local:
        for parent in {PurePosixPath(name).parent for name in names} - {PurePosixPath(".")}:
            with suppress(OSError):  # somebody else's file is in it, or it is gone
                (folder.path / parent).rmdir()


def remove_empty(folder: Folder) -> None:
    """Remove a local folder in which there is no file."""
    if folder.is_local:
        for parent, _, _ in os.walk(folder.path, topdown=False):
            with suppress(OSError):  # a file is in it
                Path(parent).rmdir()


def check_apart(archive_root: str, dataset: Folder) -> None:
    """Make sure that archive and dataset do not contain each other.

    Raises:
        ValueError: They do.
    """
    if not archive_root:
        return
    archive = Folder.at(archive_root)
    found = relation(dataset, archive)
    if found is not None:
        raise ValueError(
            f"dataset.path {dataset} {found} the archive {archive}: choose a folder outside of the archive, "
            "which prepare only reads"
        )


def check_outside(setting: str, folder: Folder, dataset: Folder) -> None:
    """Make sure that what a job writes is not in the dataset, which is neither repaired nor replaced with other files.

    Args:
        setting: Name of the setting that chooses the folder.
        folder: Where the job writes. The dataset may be in it.
        dataset: What the job reads.

    Raises:
        ValueError: The folder is the dataset, or in it.
    """
    found = relation(folder, dataset)
    if found in ("is", "is in"):
        raise ValueError(f"{setting}={folder} {found} the dataset {dataset}: choose a folder outside of it")


def dataset_around(place: Path) -> Path | None:
    """The finished dataset that a file or folder of this machine is or is in; None where there is none.

    Symbolic links are followed. A run's folder has a `dataset.json` too, and no folders of splits.
    """
    place = place.resolve()
    for folder in (place, *place.parents):
        with suppress(OSError, ValueError, AttributeError, TypeError):  # no such file, or of something else
            splits = json.loads((folder / FILE_NAME).read_bytes()).get("splits", ())
            if any((folder / name).is_dir() for name in splits):
                return folder
    return None


def relation(folder: Folder, other: Folder) -> Literal["is", "is in", "contains"] | None:
    """Tell whether a folder is another one, is in it or contains it; None where they are apart.

    Symbolic links and `..` in paths are followed, and the schemes of one store count as the same.
    """
    if folder.is_local != other.is_local:
        return None
    first, second = _parts(folder), _parts(other)
    shorter = min(len(first), len(second))
    if first[:shorter] != second[:shorter]:
        return None
    return "is" if len(first) == len(second) else "is in" if len(first) > len(second) else "contains"


_SAME_STORE = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs"}


def _parts(folder: Folder) -> tuple[str, ...]:
    """The folders on the way; of a local folder, symbolic links followed."""
    if folder.is_local:
        return folder.path.resolve().parts
    scheme, _, rest = folder.url.partition("://")
    return (_SAME_STORE.get(scheme, scheme), *(part for part in rest.split("/") if part))
