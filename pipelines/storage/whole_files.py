"""Files that are written whole; also on storage that takes no others, as a volume of Databricks.

Such storage refuses seeks in a file, appends and locks.
"""

import errno
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What `flock` answers on a file system that has no locks, such as NFS without its lock daemon."""
_CHUNK = 1 << 22


@cache
def takes_whole_files_only(folder: Path) -> bool:
    """Try whether files of a folder can be changed; the folder is created.

    Returns:
        True also where nothing can be written at all, which the first file then finds out.
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


@contextmanager
def os_errors_as(kind: type[Exception], text: str) -> Iterator[None]:
    """Turn what the system refuses within the block into one line: a text, and the system's reason.

    Raises:
        Exception: Of the given kind.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{text}: {error.strerror}") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: the one before is replaced at once.

    A link stays, and what it leads to is replaced. Into what is no file, such as `/dev/stdout`, it is written.

    Raises:
        OSError: The folder does not exist or is not writable.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    path = path.resolve() if path.is_symlink() else path
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Raises:
        OSError: It is not there, or the disk has an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_whole(file: BinaryIO, target: Path) -> None:
    """Write the bytes of an open local file to `target` from its first to its last, read them back and compare.

    Raises:
        OSError: The file cannot be written, or what was read back differs.
    """
    file.seek(0)
    sent = 0
    with target.open("wb") as output:
        while chunk := file.read(_CHUNK):
            sent = zlib.crc32(chunk, sent)
            output.write(chunk)
        output.flush()
        with suppress(OSError):  # such storage stores a file when it is closed
            os.fsync(output.fileno())
    arrived = 0
    with target.open("rb") as stored:
        while chunk := stored.read(_CHUNK):
            arrived = zlib.crc32(chunk, arrived)
    if arrived != sent or target.stat().st_size != file.tell():
        raise OSError(errno.EIO, "what was read back differs from what was written", str(target))


def copy_folder(source: Path, target: Path) -> None:
    """Make the files under `target` those under `source`, whole; what is not under `source` is removed.

    Raises:
        OSError: As `copy_whole`.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(target.rglob("*"), reverse=True):
        if not (source / path.relative_to(target)).exists():
            path.rmdir() if path.is_dir() else path.unlink()
    for path in sorted(source.rglob("*")):
        other = target / path.relative_to(source)
        if path.is_dir():
            other.mkdir(exist_ok=True)
        elif not other.is_file() or other.stat().st_size != path.stat().st_size or _is_text(path):
            with path.open("rb") as file:
                copy_whole(file, other)


def fetch_folder(source: Path, target: Path) -> None:
    """Copy what is under `source`, if it exists, to the local folder `target`."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)


def _is_text(path: Path) -> bool:
    """Whether a file may have been changed without another size; the others are written once."""
    return path.suffix == ".jsonl"
