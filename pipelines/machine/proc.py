"""Reads Linux's data on a machine, its processes and control groups, and raises this process's limit of open files.

This is the only reader of /proc and /sys/fs/cgroup.
"""

import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_UNLIMITED = 1 << 60
"""Least value that means no limit; control groups then write a number near 2**63."""
_COUNTS_OF_KILLS = ("memory.events", "memory.oom_control")
"""Files of a control group, of both versions, that count the kills by the out-of-memory killer."""


def folder_of(descriptor: int) -> Path:
    """Return the folder of an open file of this process; the file may have no name."""
    return Path(f"/proc/self/fd/{descriptor}").readlink().parent


def host_memory() -> tuple[int, str]:
    """Return the smaller of the host's memory and its control group's limit, in bytes; and which of both it is."""
    total, group = total_of_host(), limit_of_control_group()
    return (group, "the control group's limit") if group < total else (total, "the host's memory")


def total_of_host() -> int:
    """Return the host's memory in bytes."""
    return int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024


def limit_of_control_group() -> int:
    """Return the smallest memory limit, in bytes, of this process's control group and its parents, of both versions."""
    limits = [
        int(line)
        for group, name in _memory_groups("self")
        for folder in (group, *group.parents)
        for line in _lines(folder / name)
        if line.isdecimal()  # "max" means no limit
    ]
    return min([_UNLIMITED, *limits])


def memory_group(process: int) -> Path | None:
    """Return the folder of the control group that limits a process's memory; None if none is visible."""
    groups = (folder for folder, _ in _memory_groups(process))
    return next((each for each in groups if any((each / name).is_file() for name in _COUNTS_OF_KILLS)), None)


def oom_kills(group: Path) -> int:
    """Count the processes of a control group that its out-of-memory killer has killed."""
    lines = [line for name in _COUNTS_OF_KILLS for line in _lines(group / name)]
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _lines(file: Path) -> list[str]:
    """Return the lines of a file of the kernel; none if it is not there, or its process has ended."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _memory_groups(process: int | str) -> list[tuple[Path, str]]:
    """Return the folders of a process's memory control groups, of both versions, and the name of the limit's file."""
    found = []
    for line in _lines(Path(f"/proc/{process}/cgroup")):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"))
        elif not controllers:
            found.append((Path(f"/sys/fs/cgroup{path}"), "memory.max"))
    return found


def memory_of(process: int | str = "self") -> dict[str, int]:
    """Return the memory of a process in bytes, by names of `status` such as VmHWM; empty if the process is ending.

    Raises:
        OSError: The process does not exist.
    """
    lines = (line.partition(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith(" kB")}


def processor(file: Path = CPUINFO) -> dict[str, str]:
    """Return Linux's description of the first processor by name, such as "flags"; empty if Linux has none.

    Args:
        file: Path of a file in the format of `/proc/cpuinfo`.
    """
    text = file.read_text() if file.is_file() else ""
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def seconds_of_threads() -> dict[int, float]:
    """Return the processor time of each thread of this process in seconds, by its number."""
    return {
        int(task.name): 1e-9 * int(line.split()[0])
        for task in Path("/proc/self/task").iterdir()
        for line in _lines(task / "schedstat")  # one line; none if the thread has ended or the kernel has no such file
    }


def boot() -> str:
    """Return an identifier of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespace(kind: str) -> str:
    """Return the identifier of a namespace of this process, such as "net" or "pid"."""
    return os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115  the link leads nowhere


def is_process(number: object) -> bool:
    """Return whether a process with this number exists; a container has its own numbers."""
    return Path("/proc", str(number)).exists()


def is_mount_point(path: Path) -> bool:
    """Return whether something is mounted at a folder.

    Unlike `os.path.ismount`, it finds folders mounted from the same disk, and ignores Btrfs subvolumes.
    """
    mounts = [os.fsdecode(line.split()[4]) for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]
    return re.sub(r"[ \t\n\\]", lambda match: f"\\{ord(match[0]):03o}", str(path.resolve())) in mounts


def nvidia_kernel_module() -> str:
    """Return the version text of NVIDIA's kernel module; empty without the module."""
    return "\n".join(_lines(Path("/proc/driver/nvidia/version")))


def allow_open_files() -> int:
    """Raise this process's own limit, which is usually 1024, to the allowed maximum; return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed
