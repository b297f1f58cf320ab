"""Ranks as threads, which meet at every collective."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.patience import patient


class Meeting:
    """So many ranks of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier, self._rank = threading.Barrier(size, timeout=patient(60)), threading.local()
        self._values: list[Any] = [None] * size

    def all_of(self, value: Any) -> list[Any]:
        """What all ranks bring, by rank; every rank calls it."""
        self._values[self._rank.number] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def on_ranks(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns on every rank."""

        def start(rank: int) -> Any:
            self._rank.number = rank
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(start, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception())]
        # A rank that stops breaks the others' barrier: what stopped it is the error.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
