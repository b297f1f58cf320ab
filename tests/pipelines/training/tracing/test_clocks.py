import math
import socket
import struct
import threading
import time

import numpy as np

from pipelines.training.tracing.clocks import _serve, ask, compare_clocks


class Alone:
    rank, size = 0, 1

    def concatenate(self, values: np.ndarray) -> np.ndarray:
        return values


def test_equal_clocks_differ_by_less_than_the_error() -> None:
    server = _serve(1)
    offset = ask("127.0.0.1", server.getsockname()[1])
    server.close()
    assert abs(offset.seconds) <= offset.error < math.inf


def test_a_clock_that_is_ahead_is_found() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(struct.pack("!d", time.time() + 100.0))

    threading.Thread(target=answer, daemon=True).start()
    offset = ask("127.0.0.1", server.getsockname()[1])
    server.close()
    assert abs(offset.seconds - 100.0) <= offset.error


def test_a_rank_0_that_cannot_be_reached_or_goes_away_stops_nothing() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
    assert ask("127.0.0.1", port).error == math.inf
    server.close()
    assert ask("127.0.0.1", port).error == math.inf


def test_a_rank_alone_has_the_clock_of_rank_0() -> None:
    offset = compare_clocks(Alone())
    assert (offset.seconds, offset.error) == (0.0, 0.0)
