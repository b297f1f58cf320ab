"""The limit of open files and connections of this process."""

import resource
import sys
from contextlib import suppress


def allow_open_files() -> int:
    """Raise this process's own limit, which is usually 1024, to the allowed maximum; return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed
