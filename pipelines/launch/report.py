"""The way from the user's function in a worker process to the driver."""

import json
from multiprocessing.connection import Connection
from typing import Any

_connection: Connection | None = None


def connect(connection: Connection) -> None:
    """Called once by the worker process before the user's function."""
    global _connection
    _connection = connection


def report(**message: Any) -> None:
    """Send a small JSON-able message to the driver's `on_message`; outside a worker it goes nowhere.

    The sender's rank is added on the way.
    """
    if _connection is not None:
        send_message(_connection, {"kind": "report", **message})


def send_message(connection: Connection, message: dict[str, Any]) -> None:
    """Write one message frame to the task that started this process."""
    connection.send_bytes(b"M" + json.dumps(message).encode())
