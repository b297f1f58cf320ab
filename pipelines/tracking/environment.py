"""What a run is computed with: packages, host, processor."""

import os
import platform
import socket
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

_MIB = 1 << 20


def packages() -> str:
    """Return every installed distribution with its version, one per line, as `pip freeze` does."""
    found = {(each.metadata["Name"] or "").lower(): each.version for each in distributions()}
    return "".join(sorted(f"{name}=={version}\n" for name, version in found.items() if name))


def host_facts() -> dict[str, Any]:
    """Return what this machine is and what this process may use of it."""
    return {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB,
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
