"""Functions that are measured on ranks, which are processes with the launcher's environment."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, threads: int | None = 1) -> list[Any]:
    """What a function gives on each of some new ranks; `threads` of each, None: the cores divided among them."""
    from pipelines.launch.runner import BarrierRunner  # ranks import this module, and have no use for Spark

    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    runner = BarrierRunner(None, ranks, threads_per_worker=threads, log_to_driver="none")
    values: list[Any] = runner.run_all(function, *arguments)
    return values


def each_on_ranks(
    ranks: int,
    function: Callable[..., Any],
    cases: Sequence[tuple[Any, ...]],
    *,
    together: bool,
    threads: int | None = 1,
) -> Iterator[list[Any]]:
    """Yield what a function gives on each rank for each case.

    Args:
        ranks: Their number.
        function: It gets a case as its arguments.
        cases: One after the other.
        together: Whether all cases have the same processes, as in a smoke run; otherwise each has its own.
        threads: As in `on_ranks`.
    """
    groups = [cases] if together else [[case] for case in cases]
    for group in groups:
        yield from map(list, zip(*on_ranks(ranks, all_of, function, group, threads=threads), strict=True))


def all_of(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """On a rank: one case after the other."""
    return [function(*case) for case in cases]
