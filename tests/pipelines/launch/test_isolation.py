"""Nothing outlives a run, however it ends; the failure matrix counts what is left after each of its cases too."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cloudpickle
import pytest

from pipelines.launch.process import RankProcess
from pipelines.launch.rank_log import RankLog
from pipelines.launch.rank_main import Header
from pipelines.launch.runner import BarrierRunner
from tests.patience import patient

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]

DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from pipelines.launch.runner import BarrierRunner

def work(folder):
    import signal
    # A child in a session of its own, and a rank that is frozen: neither would end by itself.
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(folder, os.environ["HOROVOD_RANK"]).write_text(f"{os.getpid()} {child.pid} {os.environ['TMPDIR']}")
    os.kill(os.getpid(), signal.SIGSTOP)

BarrierRunner(None, 2).run(work, sys.argv[1])
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(60)
    while not condition():
        assert time.monotonic() < deadline, f"waited for {patient(60):g} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def gone(pid: int) -> bool:
    return not alive(pid)


def test_a_driver_that_is_killed_takes_frozen_ranks_and_their_children_along(tmp_path: Path, project: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(project)})
    try:
        wait_until(lambda: len([path for path in tmp_path.iterdir() if path.read_text().count(" ") == 2]) == 2)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    words = [word for path in tmp_path.iterdir() for word in path.read_text().split()]
    pids = [int(word) for word in words if word.isdecimal()]
    folders = [Path(word) for word in words if not word.isdecimal()]
    assert (len(pids), len(folders)) == (4, 2)
    wait_until(lambda: not any(map(alive, pids)) and not any(folder.exists() for folder in folders))


def test_a_run_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    def work() -> tuple[int, int, str]:
        import tempfile

        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        Path(tempfile.mkdtemp(), "something").write_text("left behind")
        return os.getpid(), child.pid, tempfile.gettempdir()

    for pid, child, folder in BarrierRunner(None, 2).run_all(work):
        assert not alive(pid)
        wait_until(partial(gone, child))
        assert not Path(folder).exists()


def test_the_environment_is_there_before_the_function_is_unpickled(tmp_path: Path) -> None:
    class Early:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return eval, ("__import__('os').environ['HOROVOD_RANK'] + __import__('os').environ['OMP_NUM_THREADS']",)

    runner = BarrierRunner(None, 2, threads_per_worker=3)
    assert runner.run_all(lambda early: early, Early()) == ["03", "13"]


def test_a_process_that_gets_no_function_ends_with_its_task() -> None:
    process = RankProcess({}, threads=1, log=RankLog())
    assert process.running()
    process.end()
    assert process.process.returncode == -signal.SIGKILL
    process.close()


def test_a_stop_that_comes_while_a_process_starts_waits_until_it_is_heard() -> None:
    def function() -> None:
        from pipelines.launch.report import stop_requested

        assert stop_requested()

    process = RankProcess({}, threads=1, log=RankLog())
    try:
        process.request_stop()  # Python has no handler for the signal yet
        process.begin(Header({}, wants_result=False), cloudpickle.dumps((function, (), {})))
        assert process.process.wait(timeout=patient(60)) == 0, process.log.last_lines()
    finally:
        process.end()
        process.close()
