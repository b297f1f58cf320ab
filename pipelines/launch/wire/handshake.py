"""The handshake of driver and task: both prove that they know the secret of the run, and neither sends it."""

import hmac
import secrets
import socket
from contextlib import suppress

HANDSHAKE_SECONDS = 5.0
SECRET_BYTES = 32


def accept_task(connection: socket.socket, secret: bytes) -> bool:
    """Run the driver's part; return whether the other end knows the secret.

    Raises:
        OSError: The other end is silent or hangs up.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    nonce = secrets.token_bytes(SECRET_BYTES)
    connection.sendall(nonce)
    theirs, proof = _receive(connection), _receive(connection)
    if not hmac.compare_digest(proof, hmac.digest(secret, b"task" + nonce + theirs, "sha256")):
        return False
    connection.sendall(hmac.digest(secret, b"driver" + theirs + nonce, "sha256"))
    connection.settimeout(None)
    return True


def prove_task(connection: socket.socket, secret: bytes) -> None:
    """Run the task's part.

    Raises:
        ConnectionError: The other end does not know the secret.
    """
    theirs = _receive(connection)
    nonce = secrets.token_bytes(SECRET_BYTES)
    connection.sendall(nonce + hmac.digest(secret, b"task" + theirs + nonce, "sha256"))
    if not hmac.compare_digest(_receive(connection), hmac.digest(secret, b"driver" + nonce + theirs, "sha256")):
        raise ConnectionError("the process at the driver's address does not know the secret of this run")


def hang_up(connection: socket.socket) -> None:
    """Shut down a connection or a listener, and so wake the thread that waits in it; a second call does nothing."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _receive(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < SECRET_BYTES:
        part = connection.recv(SECRET_BYTES - len(data))
        if not part:
            raise ConnectionError("the other end hung up")
        data += part
    return data
