"""The worker process: one rank, started clean by its barrier task, gone when the task is.

Reads the pickled function from standard input, which then stays open: its end means that the task is gone.
Writes messages and the result to the pipe whose descriptor is the only argument.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from pipelines.launch.report import connect, send_message

USER_ERROR_EXIT_CODE = 1
ORPHAN_EXIT_CODE = 113
LENGTH_BYTES = 8


def main() -> int:
    """Run the function; 0, or 1 where it raised."""
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    connection = Connection(int(sys.argv[1]), readable=False)
    length = int.from_bytes(_read(LENGTH_BYTES), "little")
    # From our own barrier task, which got it from our own driver.
    payload = _read(length)
    threading.Thread(target=_die_with_the_task, name="groundswell-watchdog", daemon=True).start()
    connect(connection)
    try:
        function, args, kwargs = cloudpickle.loads(payload)
        result = function(*args, **kwargs)
        connection.send_bytes(b"R" + cloudpickle.dumps(result))
    except BaseException as error:
        send_message(connection, _failure(error))
        return USER_ERROR_EXIT_CODE
    return 0


def _failure(error: BaseException) -> dict[str, Any]:
    return {
        "kind": "failure",
        "error": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _read(size: int) -> bytes:
    # The descriptor itself: a thread that waits in `sys.stdin.buffer` holds its lock, and the interpreter aborts on it.
    parts = []
    while size > 0:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            os._exit(ORPHAN_EXIT_CODE)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _die_with_the_task() -> None:
    while os.read(0, 1 << 10):
        pass
    # The task made this process the leader of a group of its own: whatever it has started goes too.
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
