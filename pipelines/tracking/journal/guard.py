"""A small guard process that sets the driver's run to failed if the driver is killed.

The guard waits for the end of its standard input, and imports MLflow only then. Until then it uses a few megabytes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipelines.tracking.store.store import TrackedRun


@contextmanager
def guarded(run: TrackedRun) -> Iterator[None]:
    """Let a guard process watch this process during the block; the block itself reports how the run ends."""
    if run.is_offline:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipelines.tracking.journal.guard_main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,  # a signal to the driver's process group does not reach it
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        # Not as arguments, which every user of this machine can read: the address may contain a password.
        process.stdin.write(json.dumps([run.uri, run.run_id]).encode() + b"\n")
        process.stdin.flush()
    try:
        yield
    finally:
        with suppress(OSError):
            process.stdin.write(b"ended\n")
            process.stdin.close()
        process.wait()
