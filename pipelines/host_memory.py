"""How much memory this process may use."""

from contextlib import suppress
from pathlib import Path

_UNLIMITED = 1 << 60
"""Control groups write a number near 2**63 where there is no limit."""


def host_memory() -> tuple[int, str]:
    """Return the host's memory, or its control group's limit if that is less, in bytes; and which of both it is."""
    total, group = total_of_host(), limit_of_control_group()
    return (group, "the control group's limit") if group < total else (total, "the host's memory")


def total_of_host() -> int:
    """Bytes of memory of the host."""
    return int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024


def limit_of_control_group() -> int:
    """Smallest memory limit, in bytes, of this process's control group and of those around it, of both versions."""
    limits = [_UNLIMITED]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, name = ("memory/", "memory.limit_in_bytes") if controllers else ("", "memory.max")
            folder = Path(f"/sys/fs/cgroup/{root}{path.strip('/')}")
            for place in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # a limit that is "max" is none
                    limits.append(int((place / name).read_text()))
    return min(limits)
