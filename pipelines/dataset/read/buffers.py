"""Reusable memory for batches: the first write to a page costs twenty times a copy into warm memory.

A buffer returns to the pool when nothing refers to its arrays any more. A view of an array refers to it, and so does a
tensor that was made from it without a copy (DLPack). So no buffer is overwritten while somebody still reads it.
"""

import math
import mmap
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from pipelines.dataset.gather import address

_ALIGNMENT = 64  # bytes; TensorFlow copies memory with another alignment


class Memory:
    """Memory of one batch: per column the values, `(rows, bytes)`, and separately their prefixes in the file."""

    def __init__(self, rows: int, columns: Mapping[str, tuple[int, int]]) -> None:
        """Map anonymous pages.

        Args:
            rows: Number of rows of a batch.
            columns: Number of bytes of each column's prefix and value.
        """
        sizes = [rows * value for _, value in columns.values()]
        places = np.cumsum([0] + [math.ceil(size / _ALIGNMENT) * _ALIGNMENT for size in sizes])
        self.pages = mmap.mmap(-1, max(1, int(places[-1])))
        with suppress(OSError):  # a kernel without huge pages
            self.pages.madvise(mmap.MADV_HUGEPAGE)
        self.places = {name: (int(place), size) for name, place, size in zip(columns, places, sizes, strict=False)}
        self.prefixes = {name: np.empty((rows, prefix), np.uint8) for name, (prefix, _) in columns.items()}
        start = address(np.frombuffer(self.pages, np.uint8))
        self.addresses = np.array([start + place for place, _ in self.places.values()], np.int64)
        """Address of the first value of each column, `(columns,)`."""
        view = memoryview(self.pages)
        self.rows: dict[str, list[tuple[memoryview, memoryview]]] = {}
        """Memory for the prefix and the value of each row, by column, as `os.preadv` takes it."""
        for name, (prefix, value) in columns.items():
            first = self.places[name][0]
            prefixes = self.prefixes[name].data.cast("B") if prefix and rows else memoryview(b"")
            self.rows[name] = [
                (prefixes[row * prefix : (row + 1) * prefix], view[first + row * value : first + (row + 1) * value])
                for row in range(rows)
            ]


class BufferPool:
    """A pool of memory for batches of one size; returned memory is lent again, up to `keep` free buffers."""

    def __init__(self, rows: int, columns: Mapping[str, tuple[int, int]], keep: int) -> None:
        """Create an empty pool.

        Args:
            rows: Number of rows of a batch.
            columns: Number of bytes of each column's prefix and value.
            keep: Number of free buffers to keep; the others are released.
        """
        self._rows, self._columns, self._keep = rows, dict(columns), keep
        self._free: list[Memory] = []
        # A finalizer may run in any thread at any moment, also in one that holds the lock.
        self._lock = threading.RLock()
        self.created = 0
        """Number of buffers made so far."""

    def lend(self) -> tuple[Memory, dict[str, NDArray[np.uint8]]]:
        """Lend free memory, and per column its values as `(rows, bytes)`.

        The memory is lent until the last of these arrays is released.
        """
        with self._lock:
            memory = self._free.pop() if self._free else None
            self.created += memory is None
        memory = memory or Memory(self._rows, self._columns)
        # numpy keeps this array as the base of every view made from it, because its own base is no array.
        whole = np.frombuffer(memory.pages, np.uint8)
        weakref.finalize(whole, self._take_back, memory).atexit = False
        return memory, {
            name: whole[place : place + size].reshape(self._rows, -1) for name, (place, size) in memory.places.items()
        }

    def _take_back(self, memory: Memory) -> None:
        with self._lock:
            if len(self._free) < self._keep:
                self._free.append(memory)
