"""The environment of a run: packages, host and processor."""

import os
import platform
import socket
from importlib.metadata import distributions
from typing import Any

from pipelines.machine.proc import processor


def packages() -> str:
    """Return every installed distribution with its version, one per line, as `pip freeze` does."""
    found = {(each.metadata["Name"] or "").lower(): each.version for each in distributions()}
    return "".join(sorted(f"{name}=={version}\n" for name, version in found.items() if name))


def host_facts() -> dict[str, Any]:
    """Return facts about this machine and the resources that this process may use."""
    return {
        "host": socket.gethostname(),
        "processor": processor().get("model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
