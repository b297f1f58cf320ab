"""Writes whole files, also to storage that accepts nothing else, such as a Databricks volume.

Such storage refuses seeks, appends and locks.
"""

import errno
import os
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of `flock` on a file system without locks, such as NFS without its lock daemon."""
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
CHUNK_BYTES = 1 << 22
_LONGEST_START = 255 - len("..") - 32
"""Bytes of a file's name in the name of its unfinished form, which adds dots and a random number."""


@cache
def takes_whole_files_only(folder: Path) -> bool:
    """Test whether files of a folder accept only whole writes; the folder is created.

    Returns:
        True also if nothing can be written at all; writing the first file then fails.
    """
    probe = folder / f".probe.{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("w+b", buffering=0) as file:
            file.write(b"ab")
            file.seek(0)
            file.write(b"c")
        with probe.open("ab", buffering=0) as file:
            file.write(b"d")
        return probe.read_bytes() != b"cbd"
    except OSError:
        return True
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def refuse_link(path: Path, owner: str) -> None:
    """Refuse a symbolic link in place of a file or folder of ours: its target would be read, written or removed.

    Raises:
        ValueError: The path is a link; the message says that no `owner` contains one.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link, which no {owner} contains: remove it")


@contextmanager
def os_errors_as(kind: type[Exception], text: str) -> Iterator[None]:
    """Convert errors of the operating system within the block to one line: a text, and the system's reason.

    Raises:
        Exception: An error of the given kind.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{text}: {error.strerror}") from None


@contextmanager
def disk_errors(folder: object, argument: str = "dataset.path") -> Iterator[None]:
    """Name the folder that cannot be written, and say how to continue.

    Args:
        folder: Folder that is written to.
        argument: Name of the argument that chooses the folder, for the message.

    Raises:
        RuntimeError: The disk is full.
        ValueError: The permission to write the folder is missing, or the folder cannot exist there.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RuntimeError(
                f"{where}: {error.strerror}: make room on the disk of {folder}; finished shards are kept, and the "
                "same command continues"
            ) from error
        if error.errno in _NOT_WRITABLE:
            raise ValueError(
                f"{argument}={folder} cannot be written ({where}: {error.strerror}): choose another place, or change "
                "its permissions"
            ) from error
        raise


@contextmanager
def new_file(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yield a path beside `path` to write to; if the block succeeds, this file replaces the one at `path` atomically.

    Args:
        path: Path of the file.
        flush: Whether to wait until the file is on the disk, so that it survives a power cut.
    """
    # A name may have 255 bytes, and this one must not be longer: no more of the file's own name fits.
    start = os.fsdecode(os.fsencode(path.name)[:_LONGEST_START])
    partial = path.with_name(f".{start}.{uuid.uuid4().hex}")
    try:
        yield partial
        if flush:
            sync_to_disk(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, and replace the existing one.

    A link stays, and its target is replaced. Special files, such as `/dev/stdout`, are written to directly.

    Raises:
        OSError: The folder does not exist or is not writable.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    with new_file(path.resolve() if path.is_symlink() else path) as partial:
        partial.write_bytes(content)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at a path: another process may have removed or replaced it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are stored on the disk.

    Raises:
        OSError: The path does not exist, or the disk has an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_whole(file: BinaryIO, target: Path) -> None:
    """Write an open local file sequentially to `target`, read the result back and compare.

    Raises:
        OSError: The file cannot be written, or the content that was read back differs.
    """
    file.seek(0)
    sent = 0
    with target.open("wb") as output:
        while chunk := file.read(CHUNK_BYTES):
            sent = zlib.crc32(chunk, sent)
            output.write(chunk)
        output.flush()
        with suppress(OSError):  # such storage stores a file when it is closed
            os.fsync(output.fileno())
    arrived = 0
    with target.open("rb") as stored:
        while chunk := stored.read(CHUNK_BYTES):
            arrived = zlib.crc32(chunk, arrived)
    if arrived != sent or target.stat().st_size != file.tell():
        raise OSError(errno.EIO, "what was read back differs from what was written", str(target))


def remove_if_empty(folder: Path) -> None:
    """Remove a local folder, unless it contains something, does not exist, or may not be removed."""
    with suppress(OSError):
        folder.rmdir()


def copy_folder(source: Path, target: Path) -> None:
    """Make the files under `target` equal to those under `source`; all others are removed.

    Raises:
        OSError: `copy_whole` fails.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(target.rglob("*"), reverse=True):
        if not (source / path.relative_to(target)).exists():
            path.rmdir() if path.is_dir() else path.unlink()
    for path in sorted(source.rglob("*")):
        other = target / path.relative_to(source)
        if path.is_dir():
            other.mkdir(exist_ok=True)
        elif (
            not other.is_file() or other.stat().st_size != path.stat().st_size or path.suffix == ".jsonl"
        ):  # which changes without a change of size
            with path.open("rb") as file:
                copy_whole(file, other)
