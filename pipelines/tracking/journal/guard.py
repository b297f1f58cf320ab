"""A small process beside a driver that sets its run to failed where the driver is killed and can say nothing itself.

It imports MLflow only then: until then it holds some megabytes and waits for its standard input to end.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipelines.tracking.store.store import TrackedRun

_ENDED = b"ended\n"
_MODULE = "pipelines.tracking.journal.guard_main"


@contextmanager
def guarded(run: TrackedRun) -> Iterator[None]:
    """Let a process of its own watch this one within the block, which says itself how the run ends."""
    if run.is_offline:
        yield
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # what kills the driver's group leaves it alone
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        # Not among its arguments, which everybody on this machine can read: the address may hold a password.
        process.stdin.write(json.dumps([run.uri, run.run_id]).encode() + b"\n")
        process.stdin.flush()
    try:
        yield
    finally:
        with suppress(BrokenPipeError, OSError):
            process.stdin.write(_ENDED)
            process.stdin.close()
        process.wait()
