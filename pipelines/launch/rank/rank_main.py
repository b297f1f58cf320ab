"""The process of one rank: its task starts it, and it ends with the task.

The process reads variables and the pickled function from standard input. Its arguments are descriptors, in this order:

* the pipes for messages and for orders;
* the file for stacks of a crash or a hang;
* the file for the return value;
* the locked file of the temporary folder;
* with a spare, the in-memory files that outlive this process.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from pipelines.launch.keras_door import hook
from pipelines.launch.rank import membership
from pipelines.launch.rank.report import StoppedOnRequest, connect, request_stop, send
from pipelines.launch.wire.messages import FunctionFailure, FunctionReturned, FunctionStarted
from pipelines.machine.proc import folder_of

LENGTH_BYTES = 8
HANDLED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})
"""Signals that are blocked at the start of this process until it has handlers for them."""


@dataclass(frozen=True)
class FunctionHeader:
    """The data that a task sends to the process together with the function."""

    environment: dict[str, str]
    """Variables that are set before the function is unpickled."""
    wants_result: bool
    is_spare: bool = False
    """Whether this process waits until the current process of the same rank has died."""


def main() -> int:
    """Run the function; return 0, or 1 if it raised."""
    pipe, faults, results, orders, _, *memory = map(int, sys.argv[1:])
    faulthandler.enable(faults)
    faulthandler.register(signal.SIGUSR1, faults, all_threads=True)
    signal.signal(signal.SIGTERM, lambda number, frame: request_stop())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    header = FunctionHeader(**json.loads(_read()))
    who = "spare: " if header.is_spare else ""
    logging.basicConfig(level=logging.INFO, format=f"{who}%(levelname)s %(name)s: %(message)s")
    os.environ.update(header.environment)
    payload = _read()  # from this rank's own task, which got it from the driver
    connect(Connection(pipe, readable=False))
    membership.connect(Connection(orders, writable=False), tuple(memory), spare=header.is_spare)
    hook.install()
    try:
        function, args, kwargs = cloudpickle.loads(payload)
        send(FunctionStarted())
        result = _call(function, args, kwargs)
        if header.wants_result:
            _write_result(result, results)
        send(FunctionReturned())
    except BaseException as error:
        lines = "".join(traceback.format_exception(error))
        send(FunctionFailure(type(error).__name__, str(error), lines, isinstance(error, StoppedOnRequest)))
        return 1
    return 0


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function; return None if it calls `sys.exit(0)`, as scripts do."""
    try:
        return function(*args, **kwargs)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
        return None


def _write_result(result: object, descriptor: int) -> None:
    """Pickle the return value into a file, because it may be larger than a message.

    Raises:
        TypeError: The value cannot be pickled.
        OSError: The value does not fit on the disk.
    """
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:  # its end writes, too
            cloudpickle.dump(result, file)
    except OSError as error:
        message = f"the return value of the function cannot be written to {folder_of(descriptor)}: {error.strerror}"
        raise OSError(error.errno, message) from error
    except Exception as error:  # a __reduce__ may raise any exception
        raise TypeError(
            f"the return value of the function, of type {type(result).__name__}, cannot be pickled: {error}"
        ) from error


def _read() -> bytes:
    return _exactly(int.from_bytes(_exactly(LENGTH_BYTES), "little"))


def _exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) < size:  # the task is gone
        os._exit(membership.ORPHAN_EXIT_CODE)
    return data


if __name__ == "__main__":
    sys.exit(main())
