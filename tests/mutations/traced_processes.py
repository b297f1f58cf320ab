"""Coverage of every Python process of a test run: of pytest's own, of ranks, of Spark's executors and of commands.

`measure.py` puts this file and a `.pth` file that imports it into the environment of the measurement only. A process
is measured where TRACED_CONFIG names coverage's configuration. What it runs belongs to the test that the file
TRACED_TEST names: each process of pytest has such a file, and all processes that come from it inherit the name. They
look at it again and again, because Spark's workers live longer than one test. What ran between two looks belongs to
both tests.
"""

import _thread
import atexit
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG_VARIABLE, TEST_VARIABLE = "TRACED_CONFIG", "TRACED_TEST"
_LOOK_SECONDS, _LOCK_SECONDS = 0.25, 5.0
_SERVERS = ("pipelines.launch.rank.fork_server", "pyspark.daemon")
"""Modules whose processes fork others, and have one thread only."""
_open, _replace, _sleep = open, os.replace, time.sleep  # tests put others in their places
_measured: Any = None
_test = ""
_written: dict[str, set[int]] = {}
_lock = _thread.allocate_lock()
_led: Path | None = None
"""The file of the current test, in a process of pytest."""


def start(config: str) -> None:
    """Measure this process and those that it forks, and save what they ran however they end."""
    global _measured, _test
    import coverage

    _measured = coverage.Coverage(config_file=config, data_suffix=True)
    _measured.start()
    _test = _current_test()
    _measured.switch_context(_test)
    os._exit = _saving_before(os._exit)  # type: ignore[assignment]
    os.kill = _saving_before(os.kill)
    os.execv, os.execve = _saving_before(os.execv), _saving_before(os.execve)  # type: ignore[assignment]
    atexit.register(save)
    # No other thread is saving while this process forks.
    os.register_at_fork(before=_lock_for_fork, after_in_parent=_unlock_after_fork, after_in_child=_after_fork)
    if not any(server in sys.orig_argv for server in _SERVERS):
        _thread.start_new_thread(_save_now_and_then, ())


def lead(file: Path) -> None:
    """Make this process one of pytest: it says itself which test runs, and all that it starts read it in a file."""
    global _led
    _led = file
    os.environ[TEST_VARIABLE] = str(file)
    switch("")


def switch(test: str) -> str:
    """Record what runs from here on as that of another test; return the one before."""
    global _test, _written
    with _lock:
        before, _test, _written = _test, test, {}
        _write_and_switch(test)
        assert _led is not None
        new = _led.with_suffix(".new")
        with _open(new, "w") as file:
            file.write(test)
        _replace(new, _led)
    return before


def save() -> None:
    """Write what this process has run since the last time."""
    if not _lock.acquire(timeout=_LOCK_SECONDS):  # called by a handler of signals while this thread saves
        return
    try:
        _save()
    finally:
        _lock.release()


def _save() -> None:
    global _test, _written
    test = _current_test() if _led is None else _test
    data = _measured._collector.data
    recent = {file: lines.copy() for file, lines in data.copy().items()}
    is_new = False
    for file, lines in recent.items():
        written = _written.setdefault(file, set())
        data[file].difference_update(written)  # a loop writes nothing again: a process can be killed while it writes
        is_new |= not lines <= written
        written |= lines
    if is_new or test != _test:
        _write_and_switch(test)
    if test != _test:
        _test, _written = test, {}
        for file, lines in recent.items():
            data[file] |= lines


def _write_and_switch(test: str) -> None:
    _measured.switch_context(test)
    _measured._data.close(force=True)  # programs count and close their open files


def _current_test() -> str:
    """The test that runs now: a forked process can have another environment and another file than its parent."""
    try:
        with _open(os.environ[TEST_VARIABLE]) as file:
            return file.read()
    except (KeyError, OSError):
        return _test


def _lock_for_fork() -> None:
    _lock.acquire(timeout=_LOCK_SECONDS)


def _unlock_after_fork() -> None:
    _lock.release()


def _after_fork() -> None:
    global _lock, _led
    _lock = _thread.allocate_lock()
    _led = None
    if (worker := sys.modules.get("pyspark.worker")) is not None:  # it can be killed as soon as its task has ended
        worker.report_times = _saving_before(worker.report_times)  # type: ignore[attr-defined]
    _thread.start_new_thread(_save_now_and_then, ())


def _save_now_and_then() -> None:
    while _led is None:
        save()
        _sleep(_LOOK_SECONDS)


def _saving_before(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def saving(*args: Any, **settings: Any) -> Any:
        # Signals to other processes end nothing here.
        if call.__name__ != "kill" or args[0] in (os.getpid(), 0):
            save()
        return call(*args, **settings)

    if call.__module__ == "posix":
        saving.__module__ = "os"  # where pickle finds it
    return saving


if CONFIG_VARIABLE in os.environ and _measured is None:
    start(os.environ[CONFIG_VARIABLE])
