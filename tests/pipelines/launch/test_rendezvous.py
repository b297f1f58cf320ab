import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pipelines.launch import rendezvous
from pipelines.launch.rendezvous import RendezvousServer
from tests.patience import patient


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1", 2, lambda address: address == "127.0.0.1")
    yield server
    server.close()


def ask(server: RendezvousServer, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient(10))
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def answers(server: RendezvousServer) -> bool:
    try:
        return ask(server, "GET", "/global/0")[0] == 200
    except ConnectionError:
        return False


def test_values_are_kept(server: RendezvousServer) -> None:
    assert ask(server, "GET", "/global/0") == (404, b"")
    assert ask(server, "PUT", "/global/0", b"\x00address\xff") == (200, b"")
    assert ask(server, "GET", "/global/0") == (200, b"\x00address\xff")
    assert ask(server, "GET", "/local_10.0.0.1/0")[0] == 404


def test_a_key_is_written_once(server: RendezvousServer) -> None:
    ask(server, "PUT", "/global/0", b"mine")
    assert ask(server, "PUT", "/global/0", b"another's")[0] == 409
    assert ask(server, "DELETE", "/global/0")[0] == 200  # what Gloo sends when a rank has joined
    assert ask(server, "PUT", "/global/0", b"another's")[0] == 409
    assert ask(server, "GET", "/global/0") == (200, b"mine")


@pytest.mark.parametrize("path", ["/", "/global", "/a/b/c", "/../etc/passwd", "/global/%2e%2e", "/" + "x" * 300 + "/0"])
def test_other_paths_are_refused(server: RendezvousServer, path: str) -> None:
    assert ask(server, "GET", path)[0] == 400
    assert ask(server, "PUT", path, b"x")[0] == 400


def test_large_values_and_many_keys_are_refused(server: RendezvousServer) -> None:
    assert ask(server, "PUT", "/global/0", bytes(1 << 17))[0] == 413
    answers = [ask(server, "PUT", f"/scope/{number}", b"x")[0] for number in range(200)]
    assert set(answers) == {200, 409}
    assert answers[-1] == 409


def test_a_rank_may_write_the_addresses_of_all_its_sockets() -> None:
    ranks, bytes_per_address = 1024, 136  # Gloo's, at an address of IPv6
    server = RendezvousServer("127.0.0.1", ranks, lambda address: True)
    assert ask(server, "PUT", "/global/0", bytes((ranks - 1) * bytes_per_address))[0] == 200
    assert ask(server, "PUT", "/global/1", bytes(ranks * 257))[0] == 413
    server.close()


def test_others_addresses_are_hung_up_on() -> None:
    server = RendezvousServer("127.0.0.1", 2, lambda address: address == "10.1.2.3")
    try:
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(server, "GET", "/global/0")
    finally:
        server.close()


def test_it_closes_when_all_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.1)
    server, lasting = (RendezvousServer("127.0.0.1", 2, lambda _: True, stay_open=stay) for stay in (False, True))
    for one in (server, lasting):
        for rank in (0, 1):
            ask(one, "PUT", f"/global/{rank}", b"x")
        ask(one, "DELETE", "/global/0")
        time.sleep(0.3)
        assert ask(one, "GET", "/global/1")[0] == 200, "closed before rank 1 had joined"
        ask(one, "DELETE", "/global/1")
    assert server._closed.wait(patient(30))
    deadline = time.monotonic() + patient(30)
    while answers(server):  # its socket is closed a moment later
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ask(lasting, "GET", "/global/0")[0] == 200
    lasting.close()


def test_ranks_are_served_while_others_flood(server: RendezvousServer) -> None:
    """Thousands of bad requests from a rank's own address: nothing breaks, the memory stays bounded."""
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", server.port), 5) as stranger:
                    stranger.sendall(b"NONSENSE\r\n\r\n")
                    stranger.recv(100)
            except OSError:
                pass

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(50):
            assert ask(server, "PUT", f"/global/{number}", b"x")[0] == 200
            assert ask(server, "GET", f"/global/{number}") == (200, b"x")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
