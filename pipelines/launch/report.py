"""The way from the user's function in a worker process to the driver."""

import json
import os
import threading
from multiprocessing.connection import Connection
from typing import Any

ATTEMPT_VARIABLE = "GROUNDSWELL_ATTEMPT"
_connection: Connection | None = None
_lock = threading.Lock()
_stop_requested = threading.Event()


class StoppedOnRequest(Exception):  # noqa: N818  no error of the function
    """Raise this where `stop_requested()` has ended the work early: what has to be kept has been saved.

    The driver then does not hold the exception for a mistake of the function: it ends with the signal that it
    received, or tries again where `retries` allows it.
    """


def connect(connection: Connection) -> None:
    """Called once by the worker process before the user's function."""
    global _connection
    _connection = connection


def report(**message: Any) -> None:
    """Send a small JSON-able message to the driver's `on_report`; outside a worker it goes nowhere.

    The sender's rank is added on the way. Every report is a sign of life for the runner's `hang_timeout`.
    """
    if _connection is not None:
        send_message(_connection, {"kind": "report", "fields": message})


def log_to_driver(message: str) -> None:
    """Show a line on the driver, whatever else its `log_to_driver` hides."""
    if _connection is None:
        print(message, flush=True)  # noqa: T201  outside a worker this process's console is the driver's
    else:
        send_message(_connection, {"kind": "callback", "line": str(message)})


def step_done() -> None:
    """Give a sign of life and nothing else, for the runner's `hang_timeout`."""
    if _connection is not None:
        send_message(_connection, {"kind": "step"})


def attempt() -> int:
    """Which attempt of the job this is, from 1."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "1"))


def stop_requested() -> bool:
    """Whether this rank was asked to end soon: save what has to be kept, then raise `StoppedOnRequest`.

    The request is a SIGTERM to the driver or to a task's process, or an executor that Spark decommissions. It reaches
    all ranks, but not in the same step: agree on it before a rank leaves collective operations. A rank that still runs
    after `stop_grace` seconds is killed. Asking costs nothing. Outside a worker the answer is always False.
    """
    return _stop_requested.is_set()


def request_stop() -> None:
    """Called in the worker process when its task asks it to stop."""
    _stop_requested.set()


def send_message(connection: Connection, message: dict[str, Any]) -> None:
    """Write one message frame to the task that started this process."""
    with _lock:
        connection.send_bytes(b"M" + json.dumps(message).encode())
