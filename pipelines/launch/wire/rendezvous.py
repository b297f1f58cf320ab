"""The HTTP key-value store in which the ranks of one job exchange the addresses that Horovod's Gloo needs.

Horovod's client sends no secret. So the server answers only addresses from which tasks have proved the secret. A key is
written once, sizes are bounded, and the server closes when all ranks have joined.
"""

import re
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

_PATH = re.compile(r"/([\w.:-]{1,200})/([\w.:-]{1,200})")
_MINIMUM_OF_LARGEST_VALUE = 1 << 16
_BYTES_PER_ADDRESS = 256
"""More than Gloo's 136 bytes for each other rank; a rank writes the addresses of all its sockets under one key."""
_MAXIMUM_KEYS_PER_RANK = 64
_MAXIMUM_CONNECTIONS_PER_RANK = 8
_REQUEST_SECONDS = 3.0
LOOK_SECONDS = 1.0
"""Seconds between two checks whether all ranks have joined."""
QUIET_SECONDS = 10.0
"""Seconds without a request before the server closes: process sets in `hvd.init` join after the ranks."""


class RendezvousServer(socketserver.ThreadingMixIn, HTTPServer):
    """Serves until all ranks have joined, or until `close`."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, bind: str, size: int, is_peer: Callable[[str], bool], *, stay_open: bool = False) -> None:
        """Bind a random port and serve.

        Args:
            bind: Address to listen on.
            size: Number of ranks.
            is_peer: Whether an address belongs to one of this job's tasks; the server hangs up on all others.
            stay_open: Serve until `close`, for ranks that create process sets later.
        """
        self._size = size
        self._is_peer = is_peer
        self._stay_open = stay_open
        self.maximum_value_bytes = max(_MINIMUM_OF_LARGEST_VALUE, _BYTES_PER_ADDRESS * size)
        self._slots = threading.BoundedSemaphore(_MAXIMUM_CONNECTIONS_PER_RANK * size + 8)
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], bytes] = {}
        self._joined: set[str] = set()
        self._last_request = time.monotonic()
        self._closed = threading.Event()
        super().__init__((bind, 0), _Handler)
        threading.Thread(target=self._serve, name="groundswell-rendezvous", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self.shutdown()

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value, or None while the key has none."""
        with self._lock:
            self._last_request = time.monotonic()
            return self._values.get((scope, key))

    def put(self, scope: str, key: str, value: bytes) -> bool:
        """Store a value unless the key already has one or there are too many keys; return whether it was stored."""
        with self._lock:
            if (scope, key) in self._values or len(self._values) >= _MAXIMUM_KEYS_PER_RANK * self._size:
                return False
            self._last_request = time.monotonic()
            self._values[scope, key] = value
            return True

    def leave(self, scope: str, key: str) -> None:
        """Record that a rank has read a scope; values stay, so that they cannot be overwritten."""
        with self._lock:
            if scope == "global" and (scope, key) in self._values:
                self._joined.add(key)

    def _serve(self) -> None:
        threading.Thread(target=self._close_when_joined, daemon=True).start()
        self.serve_forever(poll_interval=0.05)
        self.server_close()

    def _close_when_joined(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            with self._lock:
                joined = len(self._joined) >= self._size
                quiet = time.monotonic() - self._last_request > QUIET_SECONDS
            if joined and quiet and not self._stay_open:
                self.close()

    def server_bind(self) -> None:
        """Bind the port; HTTPServer's own method would also ask a name server for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: object, client_address: object) -> bool:
        """Return whether the server answers a connection."""
        assert isinstance(client_address, tuple)
        # Each request has a thread, up to a limit; the kernel's queue holds further requests.
        return self._is_peer(client_address[0]) and self._slots.acquire(timeout=_REQUEST_SECONDS)

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Answer a request in a thread of its own, and then let another request have one."""
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a client that hangs up early is not an error."""


class Rendezvous:
    """The servers of one attempt: each join of its ranks gets a new one."""

    def __init__(self, host: str, bind: str, size: int, is_peer: Callable[[str], bool], *, stay_open: bool) -> None:
        """Store the arguments; no server is open.

        Args:
            host: Address of the driver for the ranks.
            bind: See `RendezvousServer`.
            size: See `RendezvousServer`.
            is_peer: See `RendezvousServer`.
            stay_open: See `RendezvousServer`.
        """
        self._host, self._bind, self._size, self._is_peer, self._stay_open = host, bind, size, is_peer, stay_open
        self._server: RendezvousServer | None = None

    def open(self) -> dict[str, str]:
        """Open a new server, and return the variables with its address."""
        self.close()
        self._server = RendezvousServer(self._bind, self._size, self._is_peer, stay_open=self._stay_open)
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.server_port),
        }

    def close(self) -> None:
        """Close the open server if there is one."""
        if self._server is not None:
            self._server.close()


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        if (place := self._place()) is not None:
            value = self.server.get(*place)
            self._reply(404) if value is None else self._reply(200, value)

    def do_PUT(self) -> None:
        if (place := self._place()) is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > self.server.maximum_value_bytes:
            self._reply(413)
            return
        value = self.rfile.read(int(length))
        self._reply(200 if len(value) == int(length) and self.server.put(*place, value) else 409)

    def do_DELETE(self) -> None:
        if (place := self._place()) is not None:
            self.server.leave(*place)
            self._reply(200)

    def _place(self) -> tuple[str, str] | None:
        match = _PATH.fullmatch(self.path)
        if match is None:
            self._reply(400)
            return None
        return match[1], match[2]

    def _reply(self, code: int, value: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
