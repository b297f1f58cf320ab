"""A pytest plugin: the report of a failed test has the logs that it wrote and, after a time-out, all stacks.

The stacks are taken when the time-out has expired and before pytest-timeout makes the test fail: a test ends its
processes then. This happens in pytest-timeout's own signal handler, so a test that is in time pays nothing. A thread
that waits would be no better: Python 3.12 warns of it at each fork, and a warning is an error here.
"""

import faulthandler
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

Section = tuple[str, str]
_BEGAN, _FOLDER = pytest.StashKey[float](), pytest.StashKey[Path]()
_STACKS = pytest.StashKey[list[Section]]()
_LOG = re.compile(r"rank-.+\.log|daemons\.log|stderr|stdout")  # Spark's executors have the last two
_FILES, _LINES, _BYTES = 10, 60, 1 << 16
_FORK_SERVER = "pipelines.launch.rank.fork_server"
_COMMANDS_SECONDS, _ANSWER_SECONDS, _TITLE = 20.0, 2.0, 200
# Programs whose stacks can be seen: the command for it, and the signal that asks the program itself. Tests stop ranks
# by SIGSTOP, and py-spy cannot pause what is stopped already.
_PROGRAMS: dict[str, tuple[list[str], int]] = {
    "python": ([str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid"], signal.SIGUSR1),
    "java": (["jstack"], signal.SIGQUIT),
}


@pytest.fixture(scope="session", autouse=True)
def _folder_of_logs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All temporary folders of this process of tests are in one: those of modules and Spark's `work` too."""
    request.config.stash[_FOLDER] = tmp_path_factory.getbasetemp()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when the test began."""
    item.stash[_BEGAN] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what there is to look at to the report of a failure, each thing once."""
    report = yield
    if report.failed:
        report.sections.extend(item.stash.get(_STACKS, []))
        item.stash[_STACKS] = []
        _add(report.sections, _logs(item.config.stash.get(_FOLDER, None), item.stash.get(_BEGAN, 0.0)))
        item.stash[_BEGAN] = time.time()
    return report


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Put the collection of stacks before what pytest-timeout does when the time is over."""
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    if settings.method == "signal" and callable(fail) and threading.current_thread() is threading.main_thread():

        def collect_and_fail(number: int, frame: Any) -> None:
            __tracebackhide__ = True
            plugin: Any = item.config.pluginmanager.getplugin("timeout")
            if settings.disable_debugger_detection or not plugin.is_debugging():  # else it lets the test go on
                item.stash[_STACKS] = []
                _add(item.stash[_STACKS], _stacks(item))
            fail(number, frame)

        signal.signal(signal.SIGALRM, collect_and_fail)
    return result


def _add(sections: list[Section], more: Iterator[Section]) -> None:
    """Add sections; an error on the way is one of them, for a report must not become a failure itself."""
    try:
        for section in more:
            sections.append(section)
    except Exception:
        sections.append(("error of tests/failure_report.py", traceback.format_exc()))


def _logs(folder: Path | None, since: float) -> Iterator[Section]:
    """The last lines of the newest logs that were written since then; MLflow's copies of them are left out."""
    written = []
    for parent, _, names in os.walk(folder) if folder is not None else ():
        for path in (Path(parent, name) for name in names if _LOG.fullmatch(name)):
            with suppress(OSError):
                status = path.stat()
                if status.st_size and status.st_mtime >= since - 0.02:  # a file's clock ticks every few milliseconds
                    written.append((status.st_mtime, path))
    texts: dict[str, Path] = {}
    for _, path in sorted(written, reverse=True):
        with suppress(OSError):
            texts.setdefault(_last_lines(path), path)
    for text, path in islice(texts.items(), _FILES):
        yield str(path), text


def _stacks(item: pytest.Item) -> Iterator[Section]:
    """The stacks of this process, of all Python processes of a test and of all its JVMs."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        yield f"stacks of {os.getpid()}, pytest", file.read().decode(errors="replace")
    processes = [(process, *_PROGRAMS[name]) for process in _processes(item) if (name := _program(process))]
    begun = [(process, number, _begin(command, process)) for process, command, number in processes]  # all at once
    deadline = time.monotonic() + _COMMANDS_SECONDS
    for process, number, command in begun:
        code, text = (1, "") if command is None else _output(command, deadline)
        with suppress(psutil.Error, OSError):
            words = " ".join(" ".join(process.cmdline()).split())
            words = words if len(words) <= _TITLE else f"{words[: _TITLE // 2]} ... {words[-_TITLE // 2 :]}"
            yield f"stacks of {process.pid} {words}", text if code == 0 else text + _answer(process, number)


def _processes(item: pytest.Item) -> list[psutil.Process]:
    """What this process started, what was started in this test, and all ranks that were forked for the test run.

    The fork server is a child of the first process of pytest. Nothing says which test a fork of it belongs to.
    """
    own = psutil.Process()
    roots = [own]
    if hasattr(item.config, "workerinput"):  # a process of xdist
        roots += [child for child in psutil.Process(os.getppid()).children() if _FORK_SERVER in _words(child)]
    began = item.stash.get(_BEGAN, 0.0)
    found = {process for root in roots for process in (root, *root.children(recursive=True))}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            test = process.environ().get("PYTEST_CURRENT_TEST", "")
            if test.startswith(f"{item.nodeid} (") and process.create_time() > began - 1:  # it is exact to a second
                found.add(process)
    return sorted(found - {own}, key=lambda process: process.pid)


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error, OSError):
        return list(process.cmdline())
    return []


def _program(process: psutil.Process) -> str:
    """Which of the programs a process is; empty for others."""
    with suppress(psutil.Error, OSError):
        return next((name for name in _PROGRAMS if Path(process.exe()).name.startswith(name)), "")
    return ""


def _begin(command: list[str], process: psutil.Process) -> "subprocess.Popen[str] | None":
    """Start a command that shows a process's stacks; None where it is not installed."""
    with suppress(OSError):
        return subprocess.Popen(
            [*command, str(process.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    return None


def _output(command: "subprocess.Popen[str]", deadline: float) -> tuple[int, str]:
    """The exit code and the output of a command, which is killed at the deadline."""
    try:
        text = command.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        command.kill()
        text = command.communicate()[0]
    return command.returncode, text


def _answer(process: psutil.Process, number: int) -> str:
    """What a process writes to its files when a signal asks it for its stacks, as a rank and a JVM are.

    A rank writes them to a file whose descriptor is an argument of `pipelines/launch/rank/rank_main.py`, and a JVM to
    its standard output. The arguments of a fork cannot be seen: so all files are looked at.
    """
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    if caught is None or not int(caught[1], 16) >> (number - 1) & 1:  # the signal would end it
        return "(it does not handle the signal that asks for stacks)"
    sizes = before = _sizes(process.pid)
    process.send_signal(number)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        earlier, sizes = sizes, _sizes(process.pid)
        if sizes == earlier != before:
            break
    gained = [_read(path, before.get(path, 0)) for path, size in sizes.items() if size > before.get(path, 0)]
    # Any file may have grown; both a Python's and a JVM's stacks have a heading for each thread.
    return "".join(text for text in gained if "hread" in text) or "(it has not answered the signal in a file)"


def _sizes(pid: int) -> dict[Path, int]:
    """The sizes of the files that a process has open, each once."""
    sizes = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                sizes.setdefault((status.st_dev, status.st_ino), (path, status.st_size))
    return dict(sizes.values())


def _last_lines(path: Path) -> str:
    return "\n".join(_read(path, max(0, path.stat().st_size - _BYTES)).splitlines()[-_LINES:])


def _read(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
