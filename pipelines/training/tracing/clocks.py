"""The offset between a rank's clock and that of rank 0, measured over a separate connection."""

import math
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import BinaryIO

from pipelines.training.ranks.collective import HorovodCollective, gather_json, own_address

_QUESTIONS = 25
_SECONDS_TO_CONNECT = 5.0
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
    server = _serve(collective.size - 1) if collective.rank == 0 else None
    address = None if server is None else [own_address(), server.getsockname()[1]]
    host, port = gather_json(address, collective)[0]
    offset = ClockOffset(0.0, 0.0) if collective.rank == 0 else ask(host, port)
    gather_json(None, collective)  # rank 0 answers until every rank has asked
    if server is not None:
        server.shutdown(socket.SHUT_RDWR)  # unlike `close`, this ends the wait for another connection
        server.close()
    return offset


def ask(host: str, port: int) -> ClockOffset:
    """Ask the clock at an address; see `compare_clocks`."""
    try:
        with (
            socket.create_connection((host, port), timeout=_SECONDS_TO_CONNECT) as connection,
            connection.makefile("rb") as answers,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return min((_ask_once(connection, answers) for _ in range(_QUESTIONS)), key=lambda offset: offset.error)
    except (OSError, struct.error):  # a firewall, or half an answer: training must not fail because of a trace
        return ClockOffset(0.0, math.inf)


def _ask_once(connection: socket.socket, answers: BinaryIO) -> ClockOffset:
    asked = time.time()
    connection.sendall(b"?")
    answer = answers.read(_ANSWER.size)
    arrived = time.time()
    (there,) = _ANSWER.unpack(answer)
    return ClockOffset(there - (asked + arrived) / 2, (arrived - asked) / 2)


def _serve(connections: int) -> socket.socket:
    """Answer the questions of `connections` ranks, one thread per rank, until the socket is closed."""
    server = socket.create_server((own_address(), 0), backlog=max(connections, 1))

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server


def _answer(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while connection.recv(1):
                connection.sendall(_ANSWER.pack(time.time()))
        except OSError:  # the rank has ended
            return
