"""Reads the rows of a batch in C++, built when the project is installed; without it the reader works, but slower.

A long value whose start is in the page cache is copied from a map of its file. That takes half the processor time of
reading. If a file shrinks under its map, SIGBUS would end the process. The library catches this signal for its own
copies, and the batch is read again by `pread`, which reports the problem. While something else handles the signal, as
after `faulthandler.enable()`, all rows are read by `pread`.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models import compiled

LEAST_MAPPED_BYTES = 1 << 14
"""Least size of a value that is copied from a map, in bytes; shorter ones are read with fewer system calls."""
LIBRARY = compiled.Library(Path(__file__).parent).path
Integers = NDArray[np.int64]
_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "groundswell_gather": [_INTEGER, *[_INTEGER] * 2, *[_POINTER] * 5, *[_INTEGER] * 2],
    "groundswell_crc32c": [ctypes.c_uint32, ctypes.c_char_p, _INTEGER, ctypes.c_uint32, _INTEGER, _POINTER],
    "groundswell_map": [_INTEGER, _INTEGER, _INTEGER],
    "groundswell_unmap": [None, _INTEGER, _INTEGER],
}
"""Types of the functions of the library: of the result, and of the arguments."""


def address(array: NDArray[np.generic]) -> int:
    """Return the address of an array's first byte, valid while the array exists."""
    return int(array.__array_interface__["data"][0])


class Gather:
    """A reader of the rows of one split, whose columns have fixed widths."""

    def __init__(self, library: ctypes.CDLL, columns: Sequence[tuple[int, NDArray[np.uint8]]]) -> None:
        """Create a reader of these columns.

        Args:
            library: The library that `load` returns.
            columns: Bytes from row to row of each column, and the prefix of each of its values.
        """
        self._read, self._columns = library.groundswell_gather, columns
        self._table = np.array([(stride, len(prefix), address(prefix)) for stride, prefix in columns], np.int64)

    def __call__(
        self, groups: Integers, group_of: Integers, positions: Integers, values: Integers, *, always: bool
    ) -> bool:
        """Read rows and check them.

        Args:
            groups: `(groups, 4 + columns)`, the `RowGroup.entry` of each.
            group_of: `(rows,)`, the group of each row.
            positions: `(rows,)`, the number of each row in its group.
            values: `(columns,)`, address of the memory for each column's values.
            always: Whether to check rows that were checked before.

        Returns:
            Whether all rows are correct; if not, the memory may hold anything.
        """
        tables = [np.ascontiguousarray(each, np.int64) for each in (groups, group_of, positions, values)]
        given = [address(each) for each in (*tables[:3], self._table, tables[3])]
        return bool(self._read(len(group_of), len(self._columns), *given, always, LEAST_MAPPED_BYTES))


def make_gather(columns: Sequence[tuple[int, NDArray[np.uint8]]]) -> Gather | None:
    """Make a reader of rows with these columns, see `Gather`; None without the library."""
    library = load()
    return None if library is None else Gather(library, columns)


def map_file(descriptor: int, size: int) -> int:
    """Map a file for `Gather`.

    Args:
        descriptor: The open file.
        size: Bytes to map, from its start.

    Returns:
        Address of the map, or 0: the library is missing, or the filesystem has no maps or does not say what is in
        memory. Or something else has taken SIGBUS since the first map.
    """
    library = load()
    return 0 if library is None else int(library.groundswell_map(descriptor, size))


def unmap(mapping: int, size: int) -> None:
    """Remove a map of `map_file`."""
    library = load()
    assert library is not None
    library.groundswell_unmap(mapping, size)


@cache
def load() -> ctypes.CDLL | None:
    """Return the library; None, with a line in the log, if it is missing or does not load on this processor."""
    library = compiled.load(LIBRARY, _open, "rows are read in Python, which takes longer")
    if library is None:
        return None
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _open(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.groundswell_gather_level.restype = ctypes.c_int64
    if library.groundswell_gather_level() == 0:
        raise OSError("the processor has no instructions for checksums")
    return library
