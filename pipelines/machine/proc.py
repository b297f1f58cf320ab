"""What Linux says of a machine, its processes and their control groups: the one reader of /proc and /sys/fs/cgroup."""

import os
import re
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_UNLIMITED = 1 << 60
"""Control groups write a number near 2**63 where there is no limit."""
_COUNTS_OF_KILLS = ("memory.events", "memory.oom_control")
"""Files of a control group that count what the out-of-memory killer has killed, of both versions."""


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
    for group, name in _memory_groups("self"):
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # a limit that is "max" is none
                limits.append(int((folder / name).read_text()))
    return min(limits)


def memory_group(process: int) -> Path | None:
    """Folder of the control group that limits a process's memory; None where none is visible."""
    groups = (folder for folder, _ in _memory_groups(process))
    return next((each for each in groups if any((each / name).is_file() for name in _COUNTS_OF_KILLS)), None)


def oom_kills(group: Path) -> int:
    """Number of processes of a control group that its out-of-memory killer has killed."""
    for name in _COUNTS_OF_KILLS:
        with suppress(OSError):
            for line in (group / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _memory_groups(process: int | str) -> list[tuple[Path, str]]:
    """Folders of a process's control groups of memory, of both versions, and the name of the file with the limit."""
    found = []
    with suppress(OSError):  # the process has ended
        for line in Path(f"/proc/{process}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.append((Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"))
            elif not controllers:
                found.append((Path(f"/sys/fs/cgroup{path}"), "memory.max"))
    return found


def memory_of(process: int | str = "self") -> dict[str, int]:
    """Memory of a process in bytes, by the names of `status`, such as VmHWM; empty where the process is about to end.

    Raises:
        OSError: There is no such process.
    """
    lines = (line.partition(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith(" kB")}


def processor(file: Path = CPUINFO) -> dict[str, str]:
    """Return what Linux says of the first processor, by name, such as "flags"; empty where it says nothing.

    Args:
        file: A file in the format of `/proc/cpuinfo`.
    """
    text = file.read_text() if file.is_file() else ""
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def seconds_of_threads() -> dict[int, float]:
    """Time on a processor of each thread of this process, by its number."""
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended, or the kernel has no such file
            seconds[int(task.name)] = 1e-9 * int((task / "schedstat").read_text().split()[0])
    return seconds


def boot() -> str:
    """Identifier of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespace(kind: str) -> str:
    """Identifier of a namespace of this process, such as "net" or "pid"."""
    return os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115  the link leads nowhere


def is_process(number: object) -> bool:
    """Whether a process has this number; those of a container are its own."""
    return Path("/proc", str(number)).exists()


def is_mount_point(path: Path) -> bool:
    """Whether something is mounted at a folder.

    Unlike `os.path.ismount` it knows folders that are mounted from the same disk, and counts no Btrfs subvolumes.
    """
    mounts = [os.fsdecode(line.split()[4]) for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]
    return re.sub(r"[ \t\n\\]", lambda match: f"\\{ord(match[0]):03o}", str(path.resolve())) in mounts


def nvidia_kernel_module() -> str:
    """What NVIDIA's kernel module says of its version; empty where there is none."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text() if file.is_file() else ""
