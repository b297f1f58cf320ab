import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from pipelines.launch.wire import rendezvous
from pipelines.launch.wire.rendezvous import RendezvousServer
from tests.patience import patient, wait_until


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with closing(RendezvousServer("127.0.0.1", 2, lambda address: address == "127.0.0.1")) as server:
        yield server


def ask(server: RendezvousServer, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=patient(10))) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def hangs_up(server: RendezvousServer) -> bool:
    try:
        return not ask(server, "GET", "/global/0")
    except (http.client.HTTPException, OSError):
        return True


def test_values_are_kept_and_a_key_is_written_once(server: RendezvousServer) -> None:
    asked = [
        ("GET", None, (404, b"")),
        ("PUT", b"\x00address\xff", (200, b"")),
        ("PUT", b"another's", (409, b"")),
        ("DELETE", None, (200, b"")),  # what Gloo sends when a rank has joined
        ("PUT", b"another's", (409, b"")),
        ("GET", None, (200, b"\x00address\xff")),
    ]
    assert [ask(server, method, "/global/0", body) for method, body, _ in asked] == [answer for *_, answer in asked]
    assert ask(server, "GET", "/local_10.0.0.1/0")[0] == 404


@pytest.mark.parametrize("path", ["/", "/global", "/a/b/c", "/../etc/passwd", "/global/%2e%2e", "/" + "x" * 300 + "/0"])
def test_other_paths_are_refused(server: RendezvousServer, path: str) -> None:
    assert (ask(server, "GET", path)[0], ask(server, "PUT", path, b"x")[0]) == (400, 400)


def test_large_values_and_many_keys_are_refused(server: RendezvousServer) -> None:
    """A rank may write the addresses of all its sockets: here 1024, of which each has 136 bytes in Gloo at IPv6."""
    assert ask(server, "PUT", "/global/0", bytes(1 << 17))[0] == 413
    answers = [ask(server, "PUT", f"/scope/{number}", b"x")[0] for number in range(200)]
    assert set(answers) == {200, 409}
    assert answers[-1] == 409
    with closing(RendezvousServer("127.0.0.1", 1024, lambda address: True)) as large:
        sizes = (1023 * 136, 1024 * 257)
        assert [ask(large, "PUT", f"/global/{size}", bytes(size))[0] for size in sizes] == [200, 413]


def test_others_addresses_are_hung_up_on() -> None:
    with closing(RendezvousServer("127.0.0.1", 2, lambda address: address == "10.1.2.3")) as server:
        assert hangs_up(server)


def test_it_closes_when_all_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(rendezvous, "QUIET_SECONDS", 0.1)
    server, lasting = (RendezvousServer("127.0.0.1", 2, lambda _: True, stay_open=stay) for stay in (False, True))
    for one in (server, lasting):
        for rank in (0, 1):
            ask(one, "PUT", f"/global/{rank}", b"x")
        ask(one, "DELETE", "/global/0")
        time.sleep(0.3)
        assert ask(one, "GET", "/global/1")[0] == 200, "closed before rank 1 had joined"
        ask(one, "DELETE", "/global/1")
    wait_until(lambda: hangs_up(server))
    assert ask(lasting, "GET", "/global/0")[0] == 200
    lasting.close()


def test_ranks_are_served_while_others_flood(server: RendezvousServer) -> None:
    """Thousands of bad requests from a rank's own address: nothing breaks, the memory stays bounded."""
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", server.server_port), 5) as stranger:
                stranger.sendall(b"NONSENSE\r\n\r\n")
                stranger.recv(100)

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(50):
            assert (ask(server, "PUT", f"/global/{number}", b"x")[0], ask(server, "GET", f"/global/{number}")) == (
                200,
                (200, b"x"),
            )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
