import math
import secrets
import socket
import threading
import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.training.tracing import tracer
from pipelines.training.tracing.tracer import ask, compare_clocks, serve

SECRET = secrets.token_bytes(32)


@pytest.mark.parametrize("ahead", [0.0, 100.0])
def test_the_difference_of_clocks_is_found_within_its_error(ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.get_ident()
    shifted = SimpleNamespace(time=lambda: time.time() + (0.0 if threading.get_ident() == here else ahead))
    monkeypatch.setattr(tracer, "time", shifted)
    with closing(serve("127.0.0.1", SECRET)) as server:
        offset = ask("127.0.0.1", server.port, SECRET)
    assert abs(offset.seconds - ahead) <= offset.error < math.inf


def test_a_rank_0_that_cannot_be_reached_or_goes_away_stops_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        assert ask("127.0.0.1", port, SECRET).error == math.inf
    assert ask("127.0.0.1", port, SECRET).error == math.inf


def test_strangers_get_no_answer() -> None:
    with closing(serve("127.0.0.1", SECRET)) as server:
        assert (ask("127.0.0.1", server.port, bytes(32)).error, server.refused) == (math.inf, 1)


def test_a_rank_alone_has_the_clock_of_rank_0(one_rank: Any) -> None:
    offset = compare_clocks(one_rank)
    assert (offset.seconds, offset.error) == (0.0, 0.0)
