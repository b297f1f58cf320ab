"""What tests of processes wait for; functions of ranks may use it too."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.patience import patient


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Look again and again until it is true, for so long that only a test that hangs fails."""
    deadline = time.monotonic() + patient(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"waited for {patient(seconds):g} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and waits for its parent does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
