"""Which files of a job's output folder are ours, and which of them are complete.

A job writes every file atomically, and a marker in `PROGRESS_FOLDER` describes each finished one until the whole output
is finished. A job that was killed at any point can so be continued, and nothing that is not ours is ever removed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pipelines.storage.folder import Location
from pipelines.storage.lease import LEASE_PREFIX, PROGRESS_FOLDER

MARK_FILE = f"{PROGRESS_FOLDER}/plan.json"
"""File that makes an unfinished output ours; it is written before everything else."""
# `Location.new_file` writes to this name before the file gets its own; a killed attempt leaves it behind.
_TEMPORARY = re.compile(r"(?<![^/])\.([^/\n]+)\.[0-9a-f]{32}\Z")
_READ_AT_ONCE = 16
_Content = TypeVar("_Content")


def progress_pattern(marker: str) -> str:
    """Return the pattern of the files that exist only while a job runs; `marker` is that of its markers' names."""
    return rf"{PROGRESS_FOLDER}/(plan\.json|{marker}|{LEASE_PREFIX}[0-9a-f]{{32}}\.json)"


def is_lease(name: str) -> bool:
    """Return whether a file, by its path in the output, is the lease of a job."""
    return name.startswith(f"{PROGRESS_FOLDER}/{LEASE_PREFIX}")


def final_name(name: str) -> str:
    """Return the name that a file gets when it is complete."""
    return _TEMPORARY.sub(r"\1", name)


def is_leftover(name: str) -> bool:
    """Return whether only a running or killed job has a file of this path in the output, which is finished."""
    return final_name(name) != name or name.startswith(f"{PROGRESS_FOLDER}/")


def refuse_foreign(where: str, names: Iterable[str], is_ours: Callable[[str], bool], advice: str) -> None:
    """Make sure that a folder holds only files of ours, complete or not.

    Args:
        where: The folder, as the message names it.
        names: Paths of its files.
        is_ours: Function from the path of a complete file to whether it is ours.
        advice: End of the message, after "which is" or "which are".

    Raises:
        ValueError: A file is not ours; the message names it.
    """
    foreign = [name for name in names if not is_ours(final_name(name))]
    if foreign:
        more = f" and {len(foreign) - 1} more files" if len(foreign) > 1 else ""
        raise ValueError(f"{where} holds {foreign[0]}{more}, which {'are' if more else 'is'} {advice}")


def markers_in(folder: Location) -> set[str]:
    """Return the paths of all files in the folder of the markers."""
    return {f"{PROGRESS_FOLDER}/{name}" for name in folder.names(PROGRESS_FOLDER)}


def read_marker(folder: Location, marker: str, read: Callable[[bytes], _Content]) -> _Content | None:
    """Read one marker; None if it is missing or damaged, because a lost marker only costs writing its file again.

    Args:
        folder: The output.
        marker: Path of the marker.
        read: Function from the bytes of a marker to its content.
    """
    try:
        return read(folder.read(marker))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def read_markers(
    folder: Location, markers: Mapping[str, str], read: Callable[[bytes], _Content]
) -> dict[str, _Content]:
    """Read the markers of some files, by file, as far as they exist; arguments as in `read_marker`."""
    there = markers_in(folder)
    files = [file for file, marker in markers.items() if marker in there]
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        contents = pool.map(lambda file: read_marker(folder, markers[file], read), files)
        return {file: content for file, content in zip(files, contents, strict=True) if content is not None}


def complete_files(folder: Location, sizes: Mapping[str, int]) -> set[str]:
    """Return which files exist in a folder with their recorded size in bytes; subfolders are not searched."""
    there = {name: size for name, is_folder, size in folder.entries() if not is_folder}
    return {file for file, size in sizes.items() if there.get(file) == size}


def differences(existing: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    """Name the settings in which an existing output differs from the wanted one."""
    return [
        f"{name} {existing.get(name)} there, {value} asked for"
        for name, value in wanted.items()
        if existing.get(name) != value
    ]
