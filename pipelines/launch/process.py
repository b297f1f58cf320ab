"""One rank's process: clean, limited to its cores, and gone with all that it started when its task is."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from pipelines.launch.logs import Spool
from pipelines.launch.rank_main import LENGTH_BYTES

_GUARD_SECONDS = 10.0
_STACKS_SECONDS = 2.0
_MAXIMUM_TEXT = 1 << 16
_MARK = "GROUNDSWELL_WORKER"
HOST_TMPDIR_VARIABLE = "GROUNDSWELL_HOST_TMPDIR"
"""The temporary folder outside the rank's own, for what ranks of a host share and keep."""

# TensorFlow on a CPU pays for the first touch of every page of a large temporary: glibc must keep its memory.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# Spark ends tasks without a word, and a worker that is stuck watches nothing: a shell waits for the end of its input,
# which is the task's end, and kills the worker's group, whatever carries the worker's mark, and its temporary folder.
_GUARD = r"""
while read -r line; do group=$line; done
[ -z "$group" ] || kill -9 -- "-$group"
for round in 1 2 3; do
  marked=$(grep -lsaF "$1" /proc/[0-9]*/environ | cut -d/ -f3)
  [ -n "$marked" ] || break
  kill -9 $marked
done
rm -rf -- "$2"
"""


class RankProcess:
    """A Python that waits for its function; imports and forks cost time, so it starts before its rank is known."""

    def __init__(self, environment: dict[str, str], threads: int) -> None:
        """Start the process and its guard.

        Args:
            environment: Added to this process's own.
            threads: For TensorFlow and OpenMP, where `environment` says nothing.
        """
        self.log = Spool()
        self._faults = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  open as long as the process is
        self._memory = _Memory()
        self._folder = tempfile.mkdtemp(prefix="groundswell-")
        mark = f"{_MARK}={secrets.token_hex(16)}"
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "groundswell-guard", mark, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )
        self.reader, writer = Pipe(duplex=False)
        name, value = mark.split("=")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "pipelines.launch.rank_main",
                str(writer.fileno()),
                str(self._faults.fileno()),
            ],
            stdin=subprocess.PIPE,
            stdout=self.log.file,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **ALLOCATOR,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "PYTHONUNBUFFERED": "1",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "TMPDIR": self._folder,
                HOST_TMPDIR_VARIABLE: tempfile.gettempdir(),
                **dict.fromkeys(THREAD_VARIABLES, str(threads)),
                **environment,
                name: value,
            },
            pass_fds=[writer.fileno(), self._faults.fileno()],
            start_new_session=True,
        )
        writer.close()
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{self.process.pid}\n".encode())
        self._guard.stdin.flush()

    def begin(self, environment: dict[str, str], payload: bytes) -> None:
        """Hand over the function, with variables that are set before it is unpickled."""
        self.running()
        assert self.process.stdin is not None
        header = json.dumps(environment).encode()
        with suppress(BrokenPipeError):  # it died already: its exit code tells
            for part in (header, payload):
                self.process.stdin.write(len(part).to_bytes(LENGTH_BYTES, "little") + part)
            self.process.stdin.close()

    def running(self) -> bool:
        """Whether the process itself is there; remembers its memory while it is."""
        if self.process.poll() is not None:
            return False
        self._memory.look(self.process.pid)
        return True

    def stacks(self) -> str:
        """What every Python thread of a process that may be stuck is doing now."""
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECONDS
        written = -1
        while written != (written := self._faults_size()) or written == 0:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return self.faults() or "(no stack: the process did not answer)"

    def faults(self) -> str:
        """The stacks that the process wrote when it was asked or when it crashed."""
        start = max(0, self._faults_size() - _MAXIMUM_TEXT)
        return os.pread(self._faults.fileno(), _MAXIMUM_TEXT, start).decode(errors="replace").strip()

    def death(self) -> str:
        """How the process ended."""
        code = self.process.returncode
        if code >= 0:
            return f"exited with code {code}"
        words = f"killed by {signal.Signals(-code).name}"
        return words + self._memory.words() if -code == signal.SIGKILL else words

    def end(self) -> None:
        """Leave nothing behind, whatever state the process is in."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # where there was no shell to do it
        self.log.finish()

    def close(self) -> None:
        """Let files and pipes go, after `end`."""
        for end in (self.reader, self._faults, self.log):
            end.close()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def _faults_size(self) -> int:
        return os.fstat(self._faults.fileno()).st_size


class _Memory:
    """What a process used, and whether its control group's out-of-memory killer has struck since."""

    def __init__(self) -> None:
        self._group: str | None = None
        self._kills = 0
        self._peak_kib = 0

    def look(self, pid: int) -> None:
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if "VmHWM:" not in status:  # it is about to end
                return
            self._peak_kib = int(status.split("VmHWM:")[1].split()[0])
            group = _memory_group(pid)
            if group != self._group:
                self._group, self._kills = group, _oom_kills(group)

    def words(self) -> str:
        used = f"it held {self._peak_kib // 1024:,} MiB" if self._peak_kib else "its memory is not known"
        if self._group is not None and _oom_kills(self._group) > self._kills:
            return f" by the out-of-memory killer of its control group ({used})"
        return f" ({used}; if nobody else did, the out-of-memory killer did)"


def _memory_group(pid: int) -> str:
    """Folder of the control group that limits a process's memory; empty where there is none to be seen."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return f"/sys/fs/cgroup/memory{path}"
            if number == "0" and Path(f"/sys/fs/cgroup{path}/memory.events").is_file():
                return f"/sys/fs/cgroup{path}"
    return ""


def _oom_kills(group: str) -> int:
    for name in ("memory.events", "memory.oom_control"):
        with suppress(OSError):
            for line in Path(group, name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
