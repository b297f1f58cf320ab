"""The address of this host."""

import socket


def own_address() -> str:
    """Return the address at which other hosts reach this one; Horovod's Gloo binds to it too."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # a host that does not know its own name has only itself
        return "127.0.0.1"
