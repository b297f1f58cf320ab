"""The files of checkpoints: names, atomic writes, reading, listing and removal, also behind URLs."""

import errno
import lzma
import re
import shutil
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.storage.folder import Location
from pipelines.storage.whole_files import takes_whole_files_only

_DAMAGE = (
    *(OSError, ValueError, KeyError, EOFError, TypeError, FloatingPointError, zipfile.BadZipFile),
    *(AttributeError, NotImplementedError, zlib.error, lzma.LZMAError),  # of a damaged ZIP directory
)
"""Exceptions that reading a damaged file may raise."""
_MORE_SPACE = "free some space, or set training.output to a larger disk"
_NAME = re.compile(r"step-(\d{8})\.npz")
_PART_NAME = re.compile(r"(?P<checkpoint>\.?step-(?P<step>\d{8}))(\.rank-\d{5})?\.npz(\.[0-9a-f]{32})?")

Arrays = dict[str, NDArray[Any]]


class DamagedError(RuntimeError):
    """A file of a checkpoint is missing, cut short, changed, or holds values that are not finite."""


class UnknownFormatError(ValueError):
    """A checkpoint has a format that this program does not read."""


def checkpoint_path(folder: Location, step: int) -> Location:
    """Return the path of the checkpoint after `step` optimizer steps."""
    return folder / f"step-{step:08d}.npz"


def list_checkpoints(folder: Location) -> list[Location]:
    """List the checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name)


def rank_path(checkpoint: Location, rank: int) -> Location:
    """Return the path of one rank's exchange state beside a checkpoint."""
    return checkpoint.sibling(f"{checkpoint.stem}.rank-{rank:05d}.npz")


def elsewhere(rank: int, folder: Location) -> str:
    """Return the error text for a rank whose file is not in rank 0's folder."""
    return f"rank {rank} wrote elsewhere than {folder}: set training.output to storage that all hosts mount"


def refuse_non_finite(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Check that every value is finite.

    Raises:
        FloatingPointError: A value is not finite. The error names the first such array.
    """
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise FloatingPointError(f"{name.partition(':')[2] or name} is not finite")


def check_writable(folder: Location, needed_bytes: int = 0) -> None:
    """Create the folder, and check that it can be written and that its disk has enough free space.

    Args:
        folder: Folder of `training.output`, or of one run in it.
        needed_bytes: Space that checkpoints will take, as far as known.

    Raises:
        RuntimeError: The folder cannot be written, or its disk has less free space.
        StorageError: The storage behind a URL cannot be used.
    """
    folder.check()
    try:
        folder.make()
        name = f".probe.{uuid.uuid4().hex}"
        folder.write(name, bytes(4096))
        folder.remove(name)
        if not folder.is_local:
            return
        space = shutil.disk_usage(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = _MORE_SPACE if full else "set training.output to a folder with write access"
        raise RuntimeError(f"cannot write to {folder} ({error.strerror}): {remedy}") from None
    # Some network storage reports no size at all.
    if space.total > 0 and space.free < needed_bytes:
        raise RuntimeError(
            f"{folder} has {_mib(space.free)} of free space, and the checkpoints take {_mib(needed_bytes)}: "
            f"{_MORE_SPACE}"
        )


def write_failure(folder: Location, error: OSError) -> str:
    """Return the error text for a checkpoint that could not be written; the caller adds how to continue."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space" if full else "make the folder writable"
    return f"cannot write a checkpoint to {folder} ({error.strerror}): {remedy}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def write_arrays(path: Location, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write one file atomically.

    Raises:
        OSError: The file cannot be written, or the stored data differ.
        StorageError: The storage behind a URL cannot be used.
    """
    path.parent.make()
    if path.is_local and not takes_whole_files_only(path.parent.path):
        with path.new_file() as partial, partial.open("wb") as file:
            _write_arrays(file, arrays)
        return
    with tempfile.NamedTemporaryFile(prefix="groundswell-") as whole:
        _write_arrays(whole, arrays)
        whole.flush()
        path.put(Path(whole.name))


def _write_arrays(file: IO[bytes], arrays: Mapping[str, NDArray[Any]]) -> None:
    # `np.savez` leaves its ZIP file open if the disk is full. Garbage collection of that file then fails again.
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)  # type: ignore[no-untyped-call]


@contextmanager
def opened(path: Location) -> Iterator[Any]:
    """Yield the arrays of a file; an array is read, and its CRC verified, when it is accessed.

    Raises:
        DamagedError: The file is missing or damaged, or the block finds that it is. Pickled objects are refused.
    """
    try:
        with path.open() as stream, np.load(stream, allow_pickle=False) as file:
            yield file
    except (UnknownFormatError, PermissionError):
        raise
    except (*_DAMAGE, RuntimeError) as error:
        # Of the `RuntimeError`s, "is encrypted" is damage. Subclasses, such as an error of the storage, are not.
        if isinstance(error, RuntimeError) and type(error) not in (RuntimeError, NotImplementedError):
            raise
        raise DamagedError(str(error)) from error


def remove_leftovers(folder: Location, step: int) -> None:
    """Remove leftovers of killed processes up to a step: partial files, and rank states without a checkpoint."""
    found = folder.glob("*step-*")
    complete = {path.stem for path in found if _NAME.fullmatch(path.name)}
    for path in found:
        match = _PART_NAME.fullmatch(path.name)
        if match is not None and int(match["step"]) <= step and match["checkpoint"] not in complete:
            path.remove()
