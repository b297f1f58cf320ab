"""The messages and requests of a function in a rank to the driver."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from pipelines.launch.wire.encoding import encode
from pipelines.launch.wire.messages import MAXIMUM_REPORT_BYTES, RankMessage, Report, ShownLine, StepDone
from pipelines.machine.console import printable

ATTEMPT_VARIABLE = "GROUNDSWELL_ATTEMPT"
_SECONDS_BETWEEN_SIGNS = 1.0
_connection: Connection | None = None
_lock = threading.Lock()
_stop_requested = threading.Event()


class StoppedOnRequest(Exception):  # noqa: N818  this is no error
    """The exception to raise after `stop_requested()` was true and everything that must be kept has been saved.

    The driver does not treat it as an error of the function. The driver ends if it received SIGTERM, or makes another
    attempt if `retries` allows one.
    """


def report(**fields: Any) -> None:
    """Send a small message to the driver's `on_report`; outside a rank this does nothing.

    The driver adds the sender's `rank`. Every report is a sign of life for `hang_timeout`.

    Raises:
        ValueError: The message is longer than 4 MiB.
        TypeError: JSON cannot represent a value.
    """
    send(Report(fields))


def log_to_driver(message: str) -> None:
    """Show a line on the driver, even if `log_to_driver="callback"` hides the ranks' output.

    Raises:
        ValueError: The line is longer than 4 MiB.
    """
    if _connection is None:
        print(printable(str(message)), flush=True)  # noqa: T201  outside a rank this process's console is the driver's
    else:
        send(ShownLine(str(message)))


def step_done() -> None:
    """Give a sign of life for `hang_timeout`."""
    send(StepDone())


@contextmanager
def signs_of_life() -> Iterator[None]:
    """Give a sign of life every second from a thread, while this thread runs a long task with its own time limits."""
    ended = threading.Event()

    def give() -> None:
        with suppress(OSError):  # the task has ended, and this process is about to
            while not ended.wait(_SECONDS_BETWEEN_SIGNS):
                step_done()

    thread = threading.Thread(target=give, name="groundswell-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def attempt() -> int:
    """Return the number of this attempt, from 1."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "1"))


def stop_requested() -> bool:
    """Return whether this rank was asked to end soon. Then save the state, and raise `StoppedOnRequest`.

    The cause is a SIGTERM to the driver or to a task's process, or an executor that Spark decommissions. The request
    reaches every rank, but not in the same step: ranks must agree before one of them leaves a collective operation.
    A rank that still runs after `stop_grace` seconds is killed. The call is cheap; outside a rank it returns False.
    """
    return _stop_requested.is_set()


def send(message: RankMessage) -> None:
    """Write one message to the task that started this process; outside a rank this does nothing.

    Raises:
        ValueError: A report or line is longer than 4 MiB.
    """
    if _connection is None:
        return
    data = encode(message)
    if isinstance(message, Report | ShownLine) and len(data) > MAXIMUM_REPORT_BYTES:
        raise ValueError(
            f"a message of {len(data):,} bytes does not fit the {MAXIMUM_REPORT_BYTES:,} bytes that report() and "
            "log_to_driver() can send: write it to storage that the driver can read, and report its path"
        )
    with _lock:
        _connection.send_bytes(data)


def connect(connection: Connection) -> None:
    """Use this connection for all messages from now on; the rank's process calls this."""
    global _connection
    _connection = connection


def request_stop() -> None:
    """Make `stop_requested` return true; the rank's process calls this."""
    _stop_requested.set()
