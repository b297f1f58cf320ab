"""The worker process: one rank, started clean by its barrier task, gone when the task is.

Reads variables and the pickled function from standard input. Writes messages and the result to the pipe, and stacks
of a crash or a hang to the file, whose descriptors are the two arguments.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from pipelines.launch.report import connect, request_stop, send_message

USER_ERROR_EXIT_CODE = 1
ORPHAN_EXIT_CODE = 113
LENGTH_BYTES = 8


def main() -> int:
    """Run the function; 0, or 1 where it raised."""
    faults = int(sys.argv[2])
    faulthandler.enable(faults)
    faulthandler.register(signal.SIGUSR1, faults, all_threads=True)
    signal.signal(signal.SIGTERM, lambda number, frame: request_stop())
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    connection = Connection(int(sys.argv[1]), readable=False)
    os.environ.update(json.loads(_read()))
    # From our own barrier task, which got it from our own driver.
    payload = _read()
    connect(connection)
    try:
        function, args, kwargs = cloudpickle.loads(payload)
        send_message(connection, {"kind": "begun"})
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


def _read() -> bytes:
    size = int.from_bytes(_exactly(LENGTH_BYTES), "little")
    return _exactly(size)


def _exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) < size:  # the task is gone
        os._exit(ORPHAN_EXIT_CODE)
    return data


if __name__ == "__main__":
    sys.exit(main())
