"""The unfinished dataset: its owner, the fate of the old dataset, and the steps that finish it.

On local disks it is written to `<dataset>.incomplete` and is renamed to the dataset when it is complete. Behind a URL,
where folders cannot be renamed, it is written in place, and `dataset.json` makes it a dataset. The process may be
killed after every step: the next run finds out from the mark how far it was.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from pipelines.dataset.format.files import (
    files_of_finished,
    files_of_unfinished,
    is_progress,
    remove_empty,
    remove_files,
)
from pipelines.dataset.format.manifest import FILE_NAME, Manifest, read_manifest, write_manifest
from pipelines.dataset.prepare.identity import Identity
from pipelines.machine.json_text import parse_json
from pipelines.machine.proc import is_mount_point
from pipelines.storage.folder import Location
from pipelines.storage.inventory import MARK_FILE, is_lease, markers_in
from pipelines.storage.lease import PROGRESS_FOLDER
from pipelines.storage.locations import is_inside

_AT_CURRENT_FOLDER = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


@dataclass(frozen=True)
class StagingMark:
    """The mark of an unfinished dataset, in `_progress/plan.json`; it proves that the folder is ours."""

    identity: Identity
    """Settings and digests with which the job was started."""
    splits: list[str]
    removing: list[str] = field(default_factory=list)
    """Files of a dataset that is being replaced in place; they are removed before anything is written."""
    replaced: str | None = None
    """Digest of the `dataset.json` of the local dataset that this one replaces."""
    is_new: bool = False
    """Whether no shard comes from an older dataset, as in a repair."""


def staging_of(dataset: Location) -> Location:
    """Return the folder of the unfinished dataset."""
    return dataset.sibling(f"{dataset.name}.incomplete") if dataset.is_local else dataset


def read_mark(folder: Location) -> StagingMark | None:
    """Read the mark of a folder; None if it has none.

    Raises:
        ValueError: The mark is damaged.
    """
    try:
        values = parse_json(folder.read(MARK_FILE))
        known = {each.name: values[each.name] for each in fields(StagingMark)}
        mark = StagingMark(**{**known, "identity": Identity.from_json(known["identity"])})
        for name in mark.removing:
            if not is_inside(name):
                raise ValueError(f"removing {name!r}, which is no file of this folder")
        return mark
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}/{MARK_FILE} is damaged ({error}): remove {folder} if it is yours") from None


def write_mark(folder: Location, mark: StagingMark) -> None:
    """Write the mark of a folder."""
    folder.make(PROGRESS_FOLDER)
    folder.write(MARK_FILE, json.dumps({**asdict(mark), "identity": mark.identity.as_json()}).encode())


def discard(staging: Location, mark: StagingMark) -> None:
    """Remove an unfinished dataset, file by file.

    Raises:
        ValueError: The folder holds a file that is not ours; nothing is removed.
    """
    _remove_in_place(staging, mark, files_of_unfinished(staging, mark.splits))
    remove_files(staging, [MARK_FILE])
    remove_empty(staging)


def remove_finished(dataset: Location, manifest: Manifest, identity: Identity, splits: list[str]) -> None:
    """Remove a finished dataset behind a URL, file by file, `dataset.json` first; a mark lists the remaining files.

    Raises:
        ValueError: The folder holds a file that is not ours; nothing is removed.
    """
    _remove_in_place(dataset, StagingMark(identity, splits), files_of_finished(dataset, manifest))


def _remove_in_place(folder: Location, mark: StagingMark, names: Collection[str]) -> None:
    removing = [name for name in names if name != MARK_FILE and not is_lease(name)]
    write_mark(folder, replace(mark, removing=removing))
    resume_removing(folder)


def resume_removing(folder: Location) -> None:
    """Remove the files that the mark lists for removal."""
    mark = read_mark(folder)
    if mark is not None and mark.removing:
        there = folder.files()  # in a folder of that name, or behind a link, nothing is ours
        names = [name for name in mark.removing if name in there]
        # Without its manifest the rest is not a dataset.
        remove_files(folder, [name for name in names if name == FILE_NAME])
        remove_files(folder, names)
        write_mark(folder, replace(mark, removing=[]))


def check_replaceable(dataset: Location) -> None:
    """Make sure, before anything is written, that another folder can replace this one.

    Raises:
        ValueError: The folder is a mount point.
    """
    if dataset.is_local and is_mount_point(dataset.path):
        raise ValueError(
            f"{dataset} is a mount point, whose place no other folder can take: choose a dataset.path inside of it, or "
            "mount the folder above it"
        )


def link_shard(source: Location, staging: Location, name: str) -> None:
    """Link a finished shard into the staging folder; copy it where hard links do not exist."""
    old, new = source.path / name, staging.path / name
    if new.exists() and new.samefile(old):
        return
    new.unlink(missing_ok=True)
    try:
        os.link(old, new)
    except OSError:  # not every file system has hard links
        with staging.new_file(name) as path:
            shutil.copyfile(old, path)


def finish(
    staging: Location, dataset: Location, manifest: Manifest, files: Collection[str], check_owner: Callable[[], None]
) -> None:
    """Turn the unfinished dataset into a finished one atomically: by the rename, or else by its `dataset.json`.

    Args:
        staging: The unfinished dataset.
        dataset: Its final location, where an older dataset may be.
        manifest: Content of `dataset.json`.
        files: Files of the dataset; other files of earlier plans in the staging folder are removed.
        check_owner: Function that raises if another job took over.

    Raises:
        ValueError: A folder holds a file that is not ours.
        RuntimeError: Another job took over.
    """
    check_owner()  # another job's mark would make its shards ours
    mark = read_mark(staging)
    assert mark is not None, staging
    ours = files_of_unfinished(staging, mark.splits)
    remove_files(staging, [name for name in ours if name not in files and not name.startswith(f"{PROGRESS_FOLDER}/")])
    check_owner()
    write_manifest(manifest, staging)
    if staging != dataset:
        if dataset.exists():
            files_of_finished(dataset, read_manifest(dataset))
            write_mark(staging, replace(mark, replaced=_digest(dataset)))
            swap_folders(staging.path, dataset.path, _aside(dataset).path)
        else:
            staging.path.rename(dataset.path)
    clean_up(dataset)


def swap_folders(first: Path, second: Path, aside: Path) -> None:
    """Exchange two folders; if the file system cannot, move `second` to `aside` and give its name to `first`.

    Args:
        first: One folder.
        second: The other.
        aside: A free name in the folder of `second`.

    Raises:
        OSError: The folders cannot be renamed.

    Source: renameat2(2) of Linux, flag RENAME_EXCHANGE.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:  # else another C library
        if rename(_AT_CURRENT_FOLDER, bytes(first), _AT_CURRENT_FOLDER, bytes(second), _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number), str(first), None, str(second))
    second.rename(aside)
    first.rename(second)


def put_back(dataset: Location) -> None:
    """Undo the first half of an interrupted exchange of two folders: the old dataset gets its name back."""
    if not dataset.is_local or dataset.exists():
        return
    mark, old = read_mark(staging_of(dataset)), _aside(dataset)
    if mark is not None and old.exists(FILE_NAME) and _digest(old) == mark.replaced:
        old.path.rename(dataset.path)


def clean_up(dataset: Location) -> None:
    """Remove the remains of a finished dataset: its shard markers, and the dataset that it replaced."""
    mark = read_mark(dataset)
    if mark is None or not dataset.exists(FILE_NAME):
        return
    if dataset.is_local and mark.replaced is not None:
        for old in [each for each in (staging_of(dataset), _aside(dataset)) if not each.path.is_symlink()]:
            if old.exists(FILE_NAME) and _digest(old) == mark.replaced:
                remove_files(old, files_of_finished(old, read_manifest(old)), last=FILE_NAME)
            remove_empty(old)
    remove_files(
        dataset, [name for name in markers_in(dataset) if is_progress(name) and not is_lease(name)], last=MARK_FILE
    )


def _aside(dataset: Location) -> Location:
    """Return the temporary location of the old dataset on file systems that cannot exchange two folders."""
    return dataset.sibling(f".{dataset.name}.replaced")


def _digest(dataset: Location) -> str:
    return hashlib.sha256(dataset.read(FILE_NAME)).hexdigest()
