import math
import socket
import struct
import threading
import time
from typing import Any

import pytest

from pipelines.training.tracing.clocks import _serve, ask, compare_clocks


@pytest.mark.parametrize("ahead", [0.0, 100.0])
def test_the_difference_of_clocks_is_found_within_its_error(ahead: float) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(struct.pack("!d", time.time() + ahead))

    with server:
        threading.Thread(target=answer, daemon=True).start()
        offset = ask("127.0.0.1", server.getsockname()[1])
    assert abs(offset.seconds - ahead) <= offset.error < math.inf


def test_rank_0_answers_others() -> None:
    with _serve(1) as server:
        offset = ask("127.0.0.1", server.getsockname()[1])
    assert abs(offset.seconds) <= offset.error < math.inf


def test_a_rank_0_that_cannot_be_reached_or_goes_away_stops_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        assert ask("127.0.0.1", port).error == math.inf
    assert ask("127.0.0.1", port).error == math.inf


def test_a_rank_alone_has_the_clock_of_rank_0(one_rank: Any) -> None:
    offset = compare_clocks(one_rank)
    assert (offset.seconds, offset.error) == (0.0, 0.0)
