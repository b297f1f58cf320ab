"""A failure says what to look at: each test here runs pytest on a small file and reads what it prints."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import failure_report
from tests.patience import patient

LOGS = """
def write_logs(tmp_path):
    (tmp_path / "rank-0.log").write_text("".join(f"line {n} of a rank\\n" for n in range(100)))
    (tmp_path / "app-1" / "0").mkdir(parents=True)
    (tmp_path / "app-1" / "0" / "stderr").write_text("an executor was here\\n")
    (tmp_path / "app-1" / "0" / "stdout").touch()
"""
# As in the tests' own conftest: the fork server is a child of the first process of pytest.
CONFTEST = """
import os
from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE, ForkServer

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.fork_server = ForkServer(())
        os.environ[FORK_SERVER_VARIABLE] = config.fork_server.address

def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        config.fork_server.close()
"""
CHILD = """
import time

def waits_for_nobody():
    time.sleep(30)

waits_for_nobody()
"""
HANGS = f"""
import os, signal, subprocess, sys, pytest
from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE, ForkedProcess
{LOGS}
@pytest.mark.timeout(4)
def test_hangs(tmp_path):
    write_logs(tmp_path)
    address, null = os.environ[FORK_SERVER_VARIABLE], os.open(os.devnull, os.O_RDWR)
    child = subprocess.Popen([sys.executable, "child.py"])
    shell = subprocess.run(
        ["sh", "-c", '"$0" child.py > /dev/null 2>&1 & echo $!', sys.executable], capture_output=True, text=True
    )
    forked = ForkedProcess(address, "child", (), os.environ, stdin=null, output=null)
    try:
        child.wait()
    finally:
        for pid in (child.pid, int(shell.stdout), forked.pid):
            os.kill(pid, signal.SIGKILL)
        child.wait()
"""
FAILS = f"""
import time, pytest
{LOGS}
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("module")

def test_passes(tmp_path):
    (tmp_path / "rank-7.log").write_text("a log of another test")
    time.sleep(0.1)

def test_fails(folder):
    write_logs(folder)
    (folder / "copy").mkdir()
    (folder / "copy" / "rank-0.log").write_bytes((folder / "rank-0.log").read_bytes())
    assert not "a failure"
"""
ANSWERS = """
import faulthandler, os, signal, sys, tempfile, time

def waits_for_a_signal():
    print(flush=True)
    time.sleep(30)

file = tempfile.TemporaryFile()
faulthandler.register(signal.SIGUSR1, file)
waits_for_a_signal()
"""


def _pytest(folder: Path, project: Path, files: dict[str, str], *options: str) -> str:
    """Run pytest on files; what it prints."""
    place = folder / "project"
    place.mkdir()
    for name, text in {"pytest.ini": "[pytest]\n", **files}.items():
        (place / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(project), str(place)])
    plugins = ["-p", "tests.failure_report", "-p", "no:cacheprovider", "--basetemp", str(folder / "inner")]
    command = [sys.executable, "-m", "pytest", *plugins, "--rootdir", str(place), *options, "."]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def _is_reported(output: str) -> bool:
    lines = [f"line {n} of a rank" for n in range(100)]
    return "\n".join(lines[40:]) in output and lines[39] not in output and "an executor was here" in output


@pytest.mark.long
def test_a_timeout_shows_stacks_of_all_processes_and_logs(tmp_path: Path, project: Path) -> None:
    output = _pytest(tmp_path, project, {"conftest.py": CONFTEST, "child.py": CHILD, "test_it.py": HANGS}, "-n", "1")
    assert output.count("waits_for_nobody (child.py:5)") == 3, output
    assert (", pytest ---" in output, "Timeout (>4.0s)" in output) == (True, True), output
    assert "error of tests/failure_report.py" not in output
    assert _is_reported(output)


def test_a_failure_shows_the_logs_of_the_test_once(tmp_path: Path, project: Path) -> None:
    output = _pytest(tmp_path, project, {"test_it.py": FAILS})
    assert _is_reported(output)
    assert (output.count("line 99 of a rank"), "a log of another test" in output) == (1, False), output
    assert "stacks of" not in output


def test_without_py_spy_a_process_is_asked_by_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ANSWERS], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        answer = failure_report._answer(psutil.Process(child.pid), 10)
        deaf = failure_report._answer(psutil.Process(child.pid), 12)
        assert child.poll() is None
        child.kill()
    assert "in waits_for_a_signal" in answer
    assert "does not handle" in deaf


def test_an_error_of_its_own_is_a_section() -> None:
    def breaks() -> Any:
        yield "a title", "a text"
        raise OSError("no such log")

    sections: list[tuple[str, str]] = []
    failure_report._add(sections, breaks())
    assert sections[0] == ("a title", "a text")
    assert sections[1][1].endswith("OSError: no such log\n")
