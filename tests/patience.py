"""How patient the tests are: on a busy machine, a limit that only keeps a test from hanging for ever is longer.

It is a plugin of pytest. Ranks and other processes of the tests import it too, and find the same value in their
environment. `conftest.py` may import it before pytest loads it: it has no assertions to rewrite (PYTEST_DONT_REWRITE).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # the hooks import it themselves: ranks have no use for it

VARIABLE = "GROUNDSWELL_TEST_PATIENCE"
IDLE_LOAD = 2.0
"""Up to this load average limits are what the tests say."""
MOST = 8.0
"""Above it they grow with the load, up to so many times that."""


def patience() -> float:
    """How many times longer limits are here; 1 where nobody has decided."""
    return float(os.environ.get(VARIABLE, "1"))


def patient(seconds: float) -> float:
    """Make a limit as long as this machine needs it."""
    return seconds * patience()


def wait_until(condition: Callable[[], object], seconds: float = 60, *, every: float = 0.01) -> None:
    """Wait until a condition is true; after this time, made as long as this machine needs it, that is an error."""
    deadline = time.monotonic() + patient(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"waited for {patient(seconds):g} s"
        time.sleep(every)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and waits for its parent does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def patience_at(load: float) -> float:
    """How many times longer limits are at a load average."""
    return min(max(load / IDLE_LOAD, 1.0), MOST)


def pytest_configure(config: "pytest.Config") -> None:
    """Decide for all processes of this run: those of xdist and of tests inherit the environment."""
    if VARIABLE not in os.environ and not hasattr(config, "workerinput"):
        os.environ[VARIABLE] = f"{patience_at(os.getloadavg()[0]):.2f}"


def pytest_collection_modifyitems(config: "pytest.Config", items: "list[pytest.Item]") -> None:
    """Make the time longer that a test may take; what the command line says stays as it is."""
    import pytest

    if patience() == 1:
        return
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is None and config.getoption("timeout") is not None:
            continue
        given = {"timeout": config.getini("timeout") or 0}  # 0: none
        if marker is not None:
            given |= {**dict(zip(("timeout", "method"), marker.args, strict=False)), **marker.kwargs}
        given["timeout"] = patient(float(given["timeout"]))
        item.add_marker(pytest.mark.timeout(**given), append=False)
