"""Ways to fail, at several moments, on rank 0 and on another, in a real barrier stage; makes a table of RESULTS.md.

`GROUNDSWELL_FAILURE_MATRIX=<file>` keeps the table, and then all of them fail at every moment, on both. Ranks wait
for each other at every step, as a ring does, but through files: TensorFlow's import would cost ten seconds each.
"""

import ctypes
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jobs.shell.session import spark_session
from pipelines.launch.driver import preflight
from pipelines.launch.driver.failure import RankLostError
from pipelines.launch.rank.report import report, step_done
from pipelines.launch.runner import BarrierRunner, WorkerError
from tests.patience import patient, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(900)]

FAILURES = {
    "exception": r"LookupError: no such thing",
    "os._exit(3)": r"exited with code 3",
    "SIGKILL": r"killed by SIGKILL \(it held [\d,]+ MiB; if nobody else did, the out-of-memory killer did\)",
    "SIGSEGV": r"killed by SIGSEGV",
    "out of memory": r"killed by SIGKILL by the out-of-memory killer of its control group \(it held [\d,]+ MiB\)",
    "hang": r"hung: no sign of life for \d+ s",
    "lost executor": r"lost: its Spark task is gone \(ExecutorLostFailure \(executor \d+ exited",
}
MOMENTS = ("start", "middle", "end")
CULPRITS = (0, 1)
STEPS = 3
HANG_SECONDS = patient(10)  # so long that no healthy rank seems to hang while the machine is busy with other work
WAIT = """
import time
while not path.exists():
    time.sleep(0.01)
"""
MEMORY = Path("/sys/fs/cgroup/memory")
LIMITS_MEMORY = os.access(MEMORY, os.W_OK) and (MEMORY / "memory.limit_in_bytes").is_file()
"""Whether control groups with a memory limit can be made here."""
Case = tuple[str, str, int]
"""Failure, moment, culprit."""
# The moments and ranks of these show the rest.
EVERYWHERE = {"exception", "SIGKILL"}
PLACES = {("start", 1), ("middle", 0), ("end", 1)}
CASES: list[Case] = [
    (failure, moment, culprit)
    for failure, moment, culprit in product(FAILURES, MOMENTS, CULPRITS)
    if failure in EVERYWHERE or (moment, culprit) in PLACES or "GROUNDSWELL_FAILURE_MATRIX" in os.environ
]


def fail(failure: str, folder: str) -> None:
    match failure:
        case "exception":
            raise LookupError("no such thing")
        case "os._exit(3)":
            os._exit(3)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSEGV":
            ctypes.string_at(0)
        case "out of memory":
            group = MEMORY / f"groundswell-{os.getpid()}"
            group.mkdir()
            (Path(folder) / "group").write_text(str(group))
            (group / "memory.limit_in_bytes").write_text(str(100 << 20))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            # The watcher reads the group's count of kills every 0.2 s, later where the machine is busy.
            time.sleep(patient(3))
            bytearray(1 << 30)[:: 1 << 12] = b"x" * (1 << 18)
        case "hang":
            time.sleep(patient(300))
        case "lost executor":
            process = psutil.Process().parent()
            while "CoarseGrainedExecutorBackend" not in " ".join(process.cmdline()):
                process = process.parent()
            # What the driver has not heard by now is lost with the executor.
            report(about_to_end=True)
            wait_until(Path(folder, "heard").exists)
            process.kill()
            time.sleep(patient(300))
    raise AssertionError(f"{failure} did not happen")


def work(failure: str, moment: str, culprit: int, folder: str) -> None:
    rank = int(os.environ["HOROVOD_RANK"])
    place = Path(folder)
    (place / f"pid-{rank}").write_text(str(os.getpid()))

    # A rank that waits for another does so inside Horovod.
    code = compile(WAIT, "/site-packages/horovod/mpi_ops.py", "exec")

    def meet(name: str) -> None:
        (place / f"{name}-{rank}").touch()
        exec(code, {"path": place / f"{name}-{1 - rank}"})

    def perhaps(now: str) -> None:
        if (moment, culprit) == (now, rank):
            print(f"rank {rank} is about to end: {failure}")
            (place / "failed-at").write_text(str(time.time()))
            fail(failure, folder)

    perhaps("start")
    for step in range(STEPS):
        meet(f"step-{step}")
        print("step", step)
        step_done()
        if step == 1:
            perhaps("middle")
    if moment == "end" and rank == culprit:
        meet("end")
        other = Path("/proc", (place / f"pid-{1 - rank}").read_text())
        wait_until(lambda: not other.exists())
        time.sleep(patient(0.5))  # for its task to say so, and the driver waits another second
        perhaps("end")
    (place / f"end-{rank}").touch()


def all_cases(cases: list[Case], folder: str) -> dict[Case, SimpleNamespace]:
    """Run the cases one after the other on one small cluster with two executors; how each ended."""
    ended = {}
    preflight.REGISTRATION_SECONDS = patient(30)  # an executor comes in place of each that is lost
    with spark_session("failure matrix", "local-cluster[2,1,1024]") as spark:
        BarrierRunner(spark, 2, log_to_driver="none").run(len, "")
        assert left_over() == []
        for number, case in enumerate(cases):
            place = Path(folder, str(number))
            place.mkdir()
            runner = BarrierRunner(
                spark,
                2,
                log_to_driver="none",
                hang_timeout=HANG_SECONDS if case[0] == "hang" else None,
                on_report=lambda report, place=place: (place / "heard").touch(),
            )
            try:
                runner.run(work, *case, str(place))
            except (WorkerError, RankLostError) as error:
                ended[case] = SimpleNamespace(
                    text=str(error),
                    seconds=time.time() - float((place / "failed-at").read_text()),
                    kinds={outcome.rank: outcome.kind for outcome in error.outcomes},
                    root=error.root.rank,
                    traceback=error.root.traceback,
                    exit_code=error.root.exit_code,
                    last_lines=error.root.last_lines,
                    left_over=left_over(),
                )
            if (place / "group").exists():
                Path((place / "group").read_text()).rmdir()
    return ended


def left_over() -> list[str]:
    """Workers, guards, temporary folders and listening ports that are still there a moment after a run."""
    mine, deadline = tempfile.gettempdir().encode(), time.monotonic() + patient(10)
    while True:
        left = [str(path) for path in Path(tempfile.gettempdir()).glob("groundswell-*")] + open_ports()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "cmdline").read_bytes()
                is_rank = b"pipelines.launch.rank.rank_main" in words or b"groundswell-guard" in words
                if is_rank and (mine in words or mine in (path / "environ").read_bytes()):
                    left.append(words.replace(b"\0", b" ").decode(errors="replace"))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def open_ports() -> list[str]:
    """Listening ports of the driver and of Spark's Python processes, beyond pyspark's own in driver and daemons."""
    driver = psutil.Process()
    ports = []
    for process in [driver, *driver.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process != driver and "pyspark.daemon" not in process.cmdline():
                continue
            listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            own = process == driver or process.parent().name() == "java"
            ports += [f"port {connection.laddr.port} of {process.pid}" for connection in listening[own:]]
    return ports


@pytest.fixture(scope="module")
def matrix(
    in_fresh_process: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, SimpleNamespace]:
    cases = [case for case in CASES if case[0] != "out of memory" or LIMITS_MEMORY]
    ended: dict[Case, SimpleNamespace] = in_fresh_process(
        all_cases, cases, str(tmp_path_factory.mktemp("cases")), timeout=800
    )
    if "GROUNDSWELL_FAILURE_MATRIX" in os.environ:
        Path(os.environ["GROUNDSWELL_FAILURE_MATRIX"]).write_text(as_markdown(ended))
    return ended


def as_markdown(ended: dict[Case, SimpleNamespace]) -> str:
    """Seconds from the failure to the error, rank 0 / rank 1, and the first line for rank 1 in the middle."""
    lines = [f"| failure | {' | '.join(MOMENTS)} | first line of the error |", "|---|---|---|---|---|"]
    for failure in dict.fromkeys(failure for failure, _, _ in ended):
        cells = [
            " / ".join(f"{ended[failure, moment, culprit].seconds:.1f}" for culprit in CULPRITS) for moment in MOMENTS
        ]
        message = re.sub(r"\d+\.\d+\.\d+\.\d+(:\d+)?", "host", ended[failure, "middle", 1].text.splitlines()[0])
        lines.append(f"| {failure} | {' | '.join(cells)} | `{message}` |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("failure", "moment", "culprit"), CASES)
def test_one_error_names_the_cause(
    matrix: dict[Case, SimpleNamespace], failure: str, moment: str, culprit: int
) -> None:
    if failure == "out of memory" and not LIMITS_MEMORY:
        pytest.skip("no control group with a memory limit can be made here")
    assert (failure, moment, culprit) in matrix, "the job did not fail"
    ended = matrix[failure, moment, culprit]
    assert re.match(rf"rank {culprit} on \S+ failed: {FAILURES[failure]}", ended.text), ended.text
    assert ended.root == culprit
    assert f"rank {culprit} is about to end: {failure}" in ended.last_lines, ended.text
    assert ended.kinds[1 - culprit] == ("finished" if moment == "end" else "stopped"), ended.text
    assert ended.left_over == []
    assert failure not in {"exception", "hang", "SIGSEGV"} or "in fail" in ended.traceback
    codes = {"exception": 1, "os._exit(3)": 3, "SIGKILL": -9, "out of memory": -9}
    assert ended.exit_code == codes.get(failure, ended.exit_code)
