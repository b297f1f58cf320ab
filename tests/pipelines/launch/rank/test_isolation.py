"""Nothing outlives a run, however it ends; the failure matrix counts what is left after each of its cases too."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import cloudpickle
import pytest

from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE, ForkServer
from pipelines.launch.rank.process import RankProcess, rank_environment, remove_abandoned_folders
from pipelines.launch.rank.rank_log import RankLog
from pipelines.launch.rank.rank_main import FunctionHeader
from pipelines.launch.rank.report import stop_requested
from pipelines.launch.runner import BarrierRunner
from tests.patience import alive, patient, wait_until

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]

DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from pipelines.launch.runner import BarrierRunner

def work(folder):
    import signal
    # A child in a session of its own, and a rank that is frozen: neither would end by itself.
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    found = [os.getpid(), child.pid, os.getppid(), os.environ["TMPDIR"]]
    Path(folder, os.environ["HOROVOD_RANK"]).write_text(" ".join(map(str, found)))
    os.kill(os.getpid(), signal.SIGSTOP)

BarrierRunner(None, 2).run(work, sys.argv[1])
"""


@pytest.mark.parametrize("forked", [False, True])
def test_a_driver_that_is_killed_takes_frozen_ranks_and_their_children_along(
    tmp_path: Path, project: Path, forked: bool
) -> None:
    """The marks in the environments that tell the guard which processes to kill: those of forks are the server's."""
    with closing(ForkServer(["colorsys"], {**os.environ, **rank_environment(1)})) as server:
        environment = {**os.environ, "PYTHONPATH": str(project)}
        if forked:
            environment[FORK_SERVER_VARIABLE] = server.address
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], env=environment)
        try:
            wait_until(lambda: [path.read_text().count(" ") for path in tmp_path.iterdir()] == [3, 3])
        finally:
            driver.kill()
            driver.wait()
        found = [path.read_text().split() for path in tmp_path.iterdir()]
        assert {int(parent) for *_, parent, _ in found} == {server.process.pid if forked else driver.pid}
        wait_until(lambda: not any(alive(int(pid)) for *pids, _, _ in found for pid in pids))
        wait_until(lambda: not any(Path(folder).exists() for *_, folder in found))


def test_a_run_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    def work() -> tuple[int, int, str]:
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        Path(tempfile.mkdtemp(), "something").write_text("left behind")
        return os.getpid(), child.pid, tempfile.gettempdir()

    for pid, child, folder in BarrierRunner(None, 2).run_all(work):
        assert not alive(pid)
        wait_until(lambda child=child: not alive(child))
        assert not Path(folder).exists()


def test_the_next_start_removes_the_folder_of_a_rank_that_has_no_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("mine", "groundswell-without-owner", "groundswell-of-another-host"):
        (tmp_path / name).mkdir()
    (tmp_path / "groundswell-of-another-host" / ".owner").write_text("another boot")
    (tmp_path / "mine" / ".owner").touch()
    (tmp_path / "groundswell-link").symlink_to(tmp_path / "mine")
    others = set(tmp_path.rglob("*"))
    process = RankProcess({}, threads=1, log=RankLog())
    left = set(tmp_path.rglob("*"))
    for each in (process._guard, process.process):
        remove_abandoned_folders()
        assert set(tmp_path.rglob("*")) == left
        each.send_signal(signal.SIGKILL)
        each.wait()
    remove_abandoned_folders()
    assert set(tmp_path.rglob("*")) == left > others, "its task is alive"
    process.close()
    remove_abandoned_folders()
    assert set(tmp_path.rglob("*")) == others


def test_the_environment_is_there_before_the_function_is_unpickled(tmp_path: Path) -> None:
    class Early:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return eval, ("__import__('os').environ['HOROVOD_RANK'] + __import__('os').environ['OMP_NUM_THREADS']",)

    assert BarrierRunner(None, 2, threads_per_worker=3).run_all(lambda early: early, Early()) == ["03", "13"]


def test_a_process_that_gets_no_function_ends_with_its_task() -> None:
    process = RankProcess({}, threads=1, log=RankLog())
    assert process.running()
    process.end()
    assert process.process.returncode == -signal.SIGKILL
    process.close()


def test_a_stop_that_comes_while_a_process_starts_waits_until_it_is_heard() -> None:
    def function() -> None:
        assert stop_requested()

    process = RankProcess({}, threads=1, log=RankLog())
    try:
        process.request_stop()  # Python has no handler for the signal yet
        process.begin(FunctionHeader({}, wants_result=False), cloudpickle.dumps((function, (), {})))
        assert process.process.wait(timeout=patient(60)) == 0, process.log.last_lines()
    finally:
        process.end()
        process.close()
