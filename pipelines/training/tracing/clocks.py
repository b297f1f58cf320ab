"""The offset between a rank's clock and that of rank 0, measured over a separate connection."""

import math
import secrets
import struct
import time
from contextlib import closing
from dataclasses import dataclass

from pipelines.launch.wire.transport import SECRET_BYTES, ConnectionServer, FrameConnection, connect, frame
from pipelines.training.ranks.collective import HorovodCollective, gather_json, own_address

_QUESTIONS = 25
_SECONDS_FOR_AN_ANSWER = 5.0
_ANSWER = struct.Struct("!d")


@dataclass(frozen=True)
class ClockOffset:
    """The offset to add to a rank's time to get the time of rank 0."""

    seconds: float
    error: float
    """Largest error in seconds. If the clocks could not be compared, it is infinite and `seconds` is 0."""


def compare_clocks(collective: HorovodCollective) -> ClockOffset:
    """Compare this rank's clock with that of rank 0; all ranks call this together.

    Rank 0 answers each question with its time. For the fastest of 25 answers

        offset = time in the answer - (time of the question + time of the answer's arrival) / 2
        error <= (time of the answer's arrival - time of the question) / 2

    Source: Mills 1991, "Internet time synchronization: the network time protocol", with the minimum-delay filter.

    Args:
        collective: The ranks.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    server = serve(own_address(), secret) if collective.rank == 0 else None
    address = None if server is None else [own_address(), server.port, secret.hex()]
    host, port, key = gather_json(address, collective)[0]
    offset = ClockOffset(0.0, 0.0) if collective.rank == 0 else ask(host, port, bytes.fromhex(key))
    gather_json(None, collective)  # rank 0 answers until every rank has asked
    if server is not None:
        server.close()
    return offset


def ask(host: str, port: int, secret: bytes) -> ClockOffset:
    """Ask the clock at an address; see `compare_clocks`."""
    try:
        with closing(connect(host, port, secret)) as connection:
            connection.settimeout(_SECONDS_FOR_AN_ANSWER)
            return min((_ask_once(connection) for _ in range(_QUESTIONS)), key=lambda offset: offset.error)
    except (OSError, ValueError, struct.error):  # a firewall, or half an answer: a trace must not end a training
        return ClockOffset(0.0, math.inf)


def _ask_once(connection: FrameConnection) -> ClockOffset:
    asked = time.time()
    connection.send(frame(b""))
    answer, _ = connection.receive()
    arrived = time.time()
    (there,) = _ANSWER.unpack(answer)
    return ClockOffset(there - (asked + arrived) / 2, (arrived - asked) / 2)


def serve(host: str, secret: bytes) -> ConnectionServer:
    """Answer the questions of other ranks until the server is closed."""
    return ConnectionServer(host, secret, _answer, maximum_data_bytes=0, name="groundswell-clock")


def _answer(connection: FrameConnection) -> None:
    while True:
        connection.receive()
        connection.send(frame(_ANSWER.pack(time.time())))
