"""Functions of tests on real rings of ranks."""

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from pipelines.launch.runner import BarrierRunner


def on_ring(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function of a test's module on every rank of a new ring; return each rank's value.

    Ranks are forks of one interpreter: a new ring takes a second, and begins without names, seeds and residuals that
    an earlier one has left. Each rank has one thread, so that sums do not depend on the number of cores.
    """
    # The module cannot be imported in a rank: its functions travel as code.
    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    return BarrierRunner(None, ranks, threads_per_worker=1, on_log=lambda rank, line: None).run_all(function, *args)
