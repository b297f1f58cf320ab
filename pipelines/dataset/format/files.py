"""The names of a dataset's files. Only files that are ours are ever replaced or removed."""

import os
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from pipelines.dataset.format.manifest import FILE_NAME, Manifest
from pipelines.machine.json_text import parse_json
from pipelines.storage.folder import Location
from pipelines.storage.inventory import final_name, progress_pattern, refuse_foreign
from pipelines.storage.lease import PROGRESS_FOLDER
from pipelines.storage.whole_files import remove_if_empty

REJECTED_FILE = "_rejected.parquet"
"""List of bad records. Readers that search folders for Parquet files skip names with a leading underscore."""
REPORT_FILE = "report.html"
INDEX_FILE = "_index.parquet"
NOTES_FILE = "_notes.json.gz"
PETASTORM_FILE = "_common_metadata"

_TOP = (FILE_NAME, REPORT_FILE, REJECTED_FILE, INDEX_FILE, NOTES_FILE)
_SHARD = r"part-[0-9]{5,}\.parquet"
_EARLIER = ".earlier"
_NOTE = rf"[^/]+-{_SHARD}({re.escape(_EARLIER)})?\.json"
_REMOVED_AT_ONCE = 16


def note_name(shard: str, *, earlier: bool = False) -> str:
    """Return the path of a shard's marker, which says that the shard is finished, relative to the dataset.

    Args:
        shard: Path of the shard.
        earlier: Whether the marker describes a shard that is being rewritten.
    """
    return f"{PROGRESS_FOLDER}/{shard.replace('/', '-')}{_EARLIER * earlier}.json"


def notes_in(folder: Location) -> list[str]:
    """List the shard markers in the folder of an unfinished dataset, including those without a shard."""
    return [f"{PROGRESS_FOLDER}/{name}" for name in folder.names(PROGRESS_FOLDER) if re.fullmatch(_NOTE, name)]


def files_of_finished(folder: Location, manifest: Manifest) -> list[str]:
    """List the files of a finished dataset, which its `dataset.json` shows to be ours.

    Raises:
        ValueError: The folder holds another file; the message names it.
    """
    ours = {f"{split}/{PETASTORM_FILE}" for split in manifest.splits}
    ours |= {shard.file for split in manifest.splits.values() for shard in split.shards}
    return _own_files(folder, lambda name: name in ours or _is_of_any(name))


def leftovers_of_finished(folder: Location) -> list[str]:
    """List the incomplete files of a finished dataset, which killed jobs left; the caller holds the dataset."""
    return [name for name in folder.files() if final_name(name) != name and _is_of_any(final_name(name))]


def files_of_unfinished(folder: Location, splits: Collection[str]) -> list[str]:
    """List the files of an unfinished dataset with these splits, which our mark shows to be ours.

    Raises:
        ValueError: The folder holds another file; the message names it.
    """
    ours = re.compile(rf"({'|'.join(map(re.escape, splits))})/({_SHARD}|{PETASTORM_FILE})")
    return _own_files(folder, lambda name: bool(splits and ours.fullmatch(name)) or _is_of_any(name))


def is_progress(name: str) -> bool:
    """Return whether a file, by its path in the dataset, exists only while a job runs."""
    return bool(re.fullmatch(progress_pattern(_NOTE), final_name(name)))


def _is_of_any(name: str) -> bool:
    return name in _TOP or is_progress(name)


def _own_files(folder: Location, is_ours: Callable[[str], bool]) -> list[str]:
    names = sorted(folder.files())
    refuse_foreign(
        str(folder),
        names,
        is_ours,
        "not part of the dataset: move what is yours elsewhere, or choose another dataset.path; nothing was removed",
    )
    return names


def remove_files(folder: Location, names: Collection[str], *, last: str = "") -> None:
    """Remove files by name, and the local folders that become empty.

    Args:
        folder: Folder of the files.
        names: Paths relative to the folder; missing files are skipped.
        last: Name to remove last, because this file proves to whom the others belong.
    """
    with ThreadPoolExecutor(1 if folder.is_local else _REMOVED_AT_ONCE) as pool:
        list(pool.map(folder.remove, [name for name in names if name != last]))
    if last in names:
        folder.remove(last)
    if folder.is_local:
        for parent in {PurePosixPath(name).parent for name in names} - {PurePosixPath(".")}:
            remove_if_empty(folder.path / parent)


def remove_empty(folder: Location) -> None:
    """Remove a local folder that holds no file."""
    if folder.is_local:
        for parent, _, _ in os.walk(folder.path, topdown=False):
            remove_if_empty(Path(parent))


def check_apart(archive_root: str, dataset: Location) -> None:
    """Make sure that neither of archive and dataset contains the other.

    Raises:
        ValueError: One of them contains the other.
    """
    archive = Location.at(archive_root)
    found = relation(dataset, archive)
    if found is not None:
        raise ValueError(
            f"dataset.path {dataset} {found} the archive {archive}: choose a folder outside of the archive, "
            "which prepare only reads"
        )


def check_outside(setting: str, folder: Location, dataset: Location) -> None:
    """Make sure that a job does not write into the dataset: foreign files would prevent its repair or replacement.

    Args:
        setting: Name of the setting that chooses the folder.
        folder: Folder that the job writes. The dataset may be in it.
        dataset: Dataset that the job reads.

    Raises:
        ValueError: The folder is the dataset, or in it.
    """
    found = relation(folder, dataset)
    if found in ("is", "is in"):
        raise ValueError(f"{setting}={folder} {found} the dataset {dataset}: choose a folder outside of it")


def dataset_around(place: Path) -> Path | None:
    """Return the finished dataset that is, or contains, a local file or folder; None if there is none.

    Symbolic links are followed. A run's folder has a `dataset.json` too, and no folders of splits.
    """
    place = place.resolve()
    for folder in (place, *place.parents):
        with suppress(OSError, ValueError, AttributeError, TypeError):  # no such file, or a file of another kind
            splits = parse_json((folder / FILE_NAME).read_bytes()).get("splits", ())
            if any((folder / name).is_dir() for name in splits):
                return folder
    return None


def relation(folder: Location, other: Location) -> Literal["is", "is in", "contains"] | None:
    """Return how a folder is related to another one; None where they are apart.

    Symbolic links and `..` in paths are followed, and the schemes of one store count as the same.
    """
    first, second = _real_path(folder), _real_path(other)
    if first.is_relative_to(second):
        return "is" if first == second else "is in"
    return "contains" if second.is_relative_to(first) else None


_SAME_STORE = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs"}


def _real_path(folder: Location) -> PurePosixPath:
    """Return the path with the symbolic links of a local folder followed; that of a URL is relative."""
    if folder.is_local:
        return PurePosixPath(folder.path.resolve())
    scheme, _, rest = folder.url.partition("://")
    return PurePosixPath(_SAME_STORE.get(scheme, scheme), rest.lstrip("/"))
