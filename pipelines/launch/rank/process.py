"""The process of one rank, owned by its task; the process and all its children end with the task."""

import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path

from pipelines.launch.rank.fork_server import ForkedProcess, RefusedError
from pipelines.launch.rank.rank_log import RankLog
from pipelines.launch.rank.rank_main import HANDLED_SIGNALS, LENGTH_BYTES, FunctionHeader
from pipelines.launch.wire.encoding import encode
from pipelines.launch.wire.messages import RankOrder
from pipelines.machine.proc import boot, memory_group, memory_of, oom_kills

_GUARD_SECONDS = 10.0
_STACKS_SECONDS = 2.0
_MAXIMUM_TEXT = 1 << 16
_MARK = "GROUNDSWELL_WORKER"
_OWNER = ".owner"
"""File in the temporary folder of a rank; the task, its guard and the rank hold a lock on it as long as they live."""
_RANK_MODULE = "pipelines.launch.rank.rank_main"
_log = logging.getLogger(__name__)
HOST_TMPDIR_VARIABLE = "GROUNDSWELL_HOST_TMPDIR"
"""The variable with the host's temporary folder, for shared files of its ranks; each rank has its own `TMPDIR`."""

# On a CPU, TensorFlow pays for the first access to each page of a large temporary array: glibc must keep the memory.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_INHERITED = (
    *("HOROVOD_", "NCCL_", "KERAS_BACKEND", "TF_USE_LEGACY_KERAS"),
    # A function that writes to MLflow needs the driver's address and credentials.
    *("MLFLOW_TRACKING_", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_"),
    *("DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CLIENT_"),
)

# Spark may kill a task at any time, and a stuck rank cannot notice that. So a shell waits for the end of its input,
# which is the end of the task. The shell then kills the rank's process group and every process with the rank's mark in
# its environment, and removes the rank's temporary folder.
_GUARD = r"""
while read -r line; do group=$line; done
[ -z "$group" ] || kill -s KILL -- "-$group"
for round in 1 2 3; do
  marked=$(grep -lsaF "$1" /proc/[0-9]*/environ | cut -d/ -f3)
  [ -n "$marked" ] || break
  kill -s KILL $marked
done
rm -rf -- "$2"
"""


def inherited_settings() -> dict[str, str]:
    """Return the driver's variables that control how ranks compute, exchange and record: executors lack them.

    Spark sends them with the tasks, including credentials.
    """
    return {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}


def rank_environment(threads: int) -> dict[str, str]:
    """Return the variables with which every rank starts.

    Args:
        threads: Number of threads for TensorFlow and OpenMP.
    """
    backend = os.environ.get("MPLBACKEND", "")
    return {
        **ALLOCATOR,
        # A notebook's backend of Matplotlib, or none, becomes one without windows.
        "MPLBACKEND": "Agg" if not backend or backend.startswith("module://") else backend,
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
    }


class RankProcess:
    """A Python process that waits for its function; it starts before its rank is known, because a start takes time."""

    def __init__(
        self,
        environment: dict[str, str],
        threads: int,
        *,
        log: RankLog,
        memory: Sequence[int] = (),
        fork_server: str | None = None,
    ) -> None:
        """Start the process and its guard.

        Args:
            environment: Variables that are added to those of this process.
            threads: Number of threads for TensorFlow and OpenMP, unless `environment` sets it.
            log: File for all output.
            memory: Descriptors that the process also gets, see `membership.shared_memory_files`.
            fork_server: Socket of the `fork_server` that forks the process, if possible.
        """
        self.log = log
        self.result = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  open as long as this object
        self._faults = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  likewise
        self._memory = _MemoryUse()
        self._is_ended = False
        remove_abandoned_folders()
        self._folder = tempfile.mkdtemp(prefix="groundswell-")
        # The file gets its name after the lock: what has the name is locked, or was left by a dead owner.
        self._owner = Path(self._folder, f"{_OWNER}.new").open("w")  # noqa: SIM115  locked as long as any process has it
        with suppress(OSError):  # without locks, nobody can prove that a folder was left
            fcntl.flock(self._owner, fcntl.LOCK_SH)
            self._owner.write(boot())
            self._owner.flush()
            Path(self._owner.name).rename(Path(self._folder, _OWNER))
        mark = secrets.token_hex(16)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "groundswell-guard", f"{_MARK}={mark}", self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            pass_fds=[self._owner.fileno()],
            start_new_session=True,
        )
        self.reader, writer = Pipe(duplex=False)
        orders, self._orders = Pipe(duplex=False)
        files = (writer, self._faults, self.result, orders, self._owner)
        descriptors = [*(each.fileno() for each in files), *memory]
        variables = {
            **os.environ,
            **rank_environment(threads),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": self._folder,
            HOST_TMPDIR_VARIABLE: tempfile.gettempdir(),
            **environment,
            _MARK: mark,
        }
        stdin, ours = os.pipe()
        self._stdin = os.fdopen(ours, "wb")
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)  # until the process can handle them
        try:
            self.process = _start(variables, stdin, self.log.file.fileno(), descriptors, fork_server)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        os.close(stdin)
        writer.close()
        orders.close()
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{self.process.pid}\n".encode())
        self._guard.stdin.flush()

    def begin(self, header: FunctionHeader, payload: bytes) -> None:
        """Hand over the pickled function."""
        self.running()
        with suppress(BrokenPipeError):  # the process is dead: its exit code says why
            for part in (json.dumps(asdict(header)).encode(), payload):
                self._stdin.write(len(part).to_bytes(LENGTH_BYTES, "little") + part)
            self._stdin.close()

    def order(self, order: RankOrder) -> None:
        """Send the process an order that it waits for."""
        with suppress(OSError):  # the process is dead
            self._orders.send_bytes(encode(order))

    def running(self) -> bool:
        """Return whether the process itself runs, and record its memory use."""
        if self.process.poll() is not None:
            return False
        self._memory.look(self.process.pid)
        return True

    def request_stop(self) -> None:
        """Ask the function to end soon: `report.stop_requested` becomes true."""
        self.process.send_signal(signal.SIGTERM)

    def stacks(self) -> str:
        """Return the current stacks of all Python threads of a process that may be stuck."""
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECONDS
        written = -1
        while (written != (written := self._faults_size()) or written == 0) and time.monotonic() <= deadline:
            time.sleep(0.2)
        return self.faults() or "(no stack: the process did not answer)"

    def faults(self) -> str:
        """Return the stacks that the process wrote on request or at a crash."""
        start = max(0, self._faults_size() - _MAXIMUM_TEXT)
        return os.pread(self._faults.fileno(), _MAXIMUM_TEXT, start).decode(errors="replace").strip()

    @property
    def exit_code(self) -> int:
        """The exit code of the ended process, or the negative number of the signal that ended it."""
        assert self.process.returncode is not None
        return self.process.returncode

    def death(self) -> str:
        """Return how the process ended, in words."""
        if self.exit_code >= 0:
            return f"exited with code {self.exit_code}"
        words = f"killed by {signal.Signals(-self.exit_code).name}"
        return words + self._memory.words() if self.exit_code == -signal.SIGKILL else words

    def end(self) -> None:
        """Kill the process and all its children, and remove its temporary folder; a second call does nothing."""
        if self._is_ended:  # by now another process may have its number
            return
        self._is_ended = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.write(b"\n")  # the group is gone, and another one may have its number
            self._guard.stdin.close()
        try:
            self._guard.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # if no shell did it

    def close(self) -> None:
        """Close files and pipes, after `end`."""
        for end in (self.reader, self._orders, self._faults, self.result, self._owner):
            end.close()
        with suppress(BrokenPipeError):
            self._stdin.close()

    def _faults_size(self) -> int:
        return os.fstat(self._faults.fileno()).st_size


def remove_abandoned_folders() -> None:
    """Remove the temporary folders of ranks whose task, guard and process have all died, as with their container.

    Only folders of this user that were made on this host since it booted are removed. A folder is removed only while
    its lock is held, which a living owner prevents. No link is followed.
    """
    for path in Path(tempfile.gettempdir()).glob(f"groundswell-*/{_OWNER}"):
        with suppress(OSError), path.open() as owner:  # the owner lives, or another task removes the folder
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Some shared file systems hold locks on one host only: there another host's folder seems to be free.
            if owner.read() == boot() and path.parent.stat().st_uid == os.getuid():
                shutil.rmtree(path.parent)  # refuses a link


def _start(
    variables: dict[str, str], stdin: int, output: int, descriptors: Sequence[int], fork_server: str | None
) -> "subprocess.Popen[bytes] | ForkedProcess":
    """Start the rank's process in a new session: a fork of the server if possible, else a new interpreter."""
    if fork_server is not None:
        try:
            return ForkedProcess(
                fork_server, _RANK_MODULE, (), variables, stdin=stdin, output=output, descriptors=descriptors
            )
        except (OSError, RefusedError) as error:
            _log.info("%s: the rank is a new interpreter", error)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _RANK_MODULE, *map(str, descriptors)],
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=variables,
        pass_fds=descriptors,
        start_new_session=True,
    )


class _MemoryUse:
    """The memory use of a process, and whether the out-of-memory killer of its control group has killed since."""

    def __init__(self) -> None:
        self._group: Path | None = None
        self._kills = 0
        self._peak = 0

    def look(self, pid: int) -> None:
        with suppress(OSError):
            memory = memory_of(pid)
            if "VmHWM" not in memory:  # the process is about to end
                return
            # Mapped pages of files, such as the dataset's, do not cause a shortage of memory.
            self._peak = max(self._peak, memory["VmHWM"] - memory.get("RssFile", 0))
            group = memory_group(pid)
            if group != self._group:
                self._group, self._kills = group, oom_kills(group) if group is not None else 0

    def words(self) -> str:
        used = f"it held {self._peak >> 20:,} MiB" if self._peak else "its memory is not known"
        if self._group is not None and oom_kills(self._group) > self._kills:
            return f" by the out-of-memory killer of its control group ({used})"
        return f" ({used}; if nobody else did, the out-of-memory killer did)"
