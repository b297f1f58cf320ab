"""The address of this host."""

import socket


def own_address() -> str:
    """Return the address at which other hosts reach this one; Horovod's Gloo also binds to it."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # a host that cannot resolve its own name can only be reached from itself
        return "127.0.0.1"
