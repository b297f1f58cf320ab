"""Processes that are forked from one interpreter, without TensorFlow: what they run, how they end, what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE, ForkedProcess, ForkServer, RefusedError
from pipelines.launch.rank.process import rank_environment
from pipelines.launch.runner import BarrierRunner
from tests.patience import alive, patient, wait_until

MODULE = """
import json, os, random, signal, sys, tempfile
import numpy

what, *numbers = sys.argv[1:]
state = {
    "pid": os.getpid(), "session": os.getsid(0), "environment": dict(os.environ), "folder": os.getcwd(),
    "imported": "colorsys" in before, "random": [random.random(), numpy.random.random()], "name": __name__,
    "temporary": tempfile.gettempdir(), "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "input": sys.stdin.read(), "path": sys.path,
}
for number in numbers:
    os.write(int(number), b"written")
print(json.dumps(state), flush=True)
if what == "raise":
    raise LookupError("no such thing")
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "wait":
    signal.pause()
sys.exit(3 if what == "exit" else 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module that tells what it finds."""
    path = tmp_path_factory.mktemp("modules")
    (path / "told.py").write_text("import sys\nbefore = set(sys.modules)\n" + MODULE)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with closing(ForkServer(["colorsys", "numpy"], {"KERAS_BACKEND": "tensorflow"})) as started:
        yield started


class Told(ForkedProcess):
    """A forked process of that module, and what it printed."""

    def __init__(self, server: ForkServer, folder: Path, *arguments: str, **environment: str) -> None:
        self.output, self.file = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile()  # noqa: SIM115
        reading, writing = os.pipe()
        os.write(writing, b"hello")
        os.close(writing)
        variables = {"PYTHONPATH": str(folder), "KERAS_BACKEND": "tensorflow", "TMPDIR": str(folder), **environment}
        super().__init__(
            server.address,
            "told",
            arguments,
            variables,
            stdin=reading,
            output=self.output.fileno(),
            descriptors=[self.file.fileno()],
        )
        os.close(reading)

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()


def state_of(told: Told) -> dict[str, object]:
    return dict(json.loads(told.text().splitlines()[0]))


def test_a_fork_is_a_process_of_its_own(server: ForkServer, folder: Path) -> None:
    first, second = (Told(server, folder, "exit", KIND=kind) for kind in ("one", "two"))
    assert (first.wait(), second.wait(), first.poll()) == (3, 3, 3)
    states = state_of(first), state_of(second)
    for told, state, kind in zip((first, second), states, ("one", "two"), strict=True):
        assert state == state | {
            "pid": told.pid,
            "session": told.pid,
            "environment": {
                "PYTHONPATH": str(folder),
                "KERAS_BACKEND": "tensorflow",
                "TMPDIR": str(folder),
                "KIND": kind,
            },
            "imported": True,
            "name": "__main__",
            "input": "hello",
            "temporary": str(folder),
            "folder": str(Path.cwd()),
            "blocked": [],
        }
        assert state["path"][0] == str(folder)  # type: ignore[index]
        told.file.seek(0)
        assert told.file.read() == b"written"
    assert not set(states[0]["random"]) & set(states[1]["random"])  # type: ignore[call-overload]


@pytest.mark.parametrize(("what", "code", "text"), [("raise", 1, "LookupError: no such thing"), ("kill", -9, "")])
def test_how_a_fork_ends_is_passed_on(server: ForkServer, folder: Path, what: str, code: int, text: str) -> None:
    told = Told(server, folder, what)
    assert (told.wait(), text in told.text()) == (code, True)


def test_a_signal_reaches_a_fork_and_nothing_that_has_its_number_later(
    server: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")  # a fork may end, and its number be free, before the caller looks for it
    told = Told(server, folder, "wait")
    assert told.poll() is None
    told.send_signal(signal.SIGTERM)
    assert told.wait() == -signal.SIGTERM
    told.send_signal(signal.SIGKILL)


def test_signals_that_the_caller_blocks_are_blocked(server: ForkServer, folder: Path) -> None:
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        told = Told(server, folder, "end")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
    assert (told.wait(), state_of(told)["blocked"]) == (0, [int(signal.SIGUSR1)])


@pytest.mark.parametrize("variable", ["KERAS_BACKEND", "MALLOC_ARENA_MAX", "PYTHONOPTIMIZE", "LD_PRELOAD"])
def test_another_value_of_what_is_read_at_the_start_is_refused(server: ForkServer, folder: Path, variable: str) -> None:
    with pytest.raises(RefusedError, match=f"another value of {variable}"):
        Told(server, folder, "end", **{variable: "1"})


def test_a_server_of_other_code_refuses(server: ForkServer, tmp_path: Path) -> None:
    """A copy of the package asks for a fork, as with `--py-files`."""
    package = shutil.copytree(Path(sys.modules["pipelines"].__path__[0]), tmp_path / "pipelines") / "launch"
    code = (
        "from pipelines.launch.rank.fork_server import ForkedProcess\n"
        f"ForkedProcess({server.address!r}, 'told', [], {{'KERAS_BACKEND': 'tensorflow'}}, stdin=0, output=1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=patient(60),
    )  # fmt: skip
    assert "RefusedError" in done.stderr
    assert f"it belongs to {sys.prefix}, {package}" in done.stderr


def test_a_fork_outlives_its_server_but_is_not_waited_for_in_vain(folder: Path) -> None:
    with closing(ForkServer([], {"KERAS_BACKEND": "tensorflow"})) as server:
        told = Told(server, folder, "wait")
        wait_until(lambda: os.fstat(told.output.fileno()).st_size or told.poll() is not None)  # it runs its module
        assert told.poll() is None, "it ended without a word"
    assert told.wait() == -signal.SIGKILL, told.text()
    wait_until(lambda: not alive(told.pid))
    with pytest.raises(OSError, match="No such file"):
        Told(server, folder, "end")


def test_a_server_ends_with_its_owner(folder: Path) -> None:
    code = "import os; from pipelines.launch.rank.fork_server import ForkServer\n"
    code += "print(ForkServer([]).process.pid, flush=True)\nos._exit(0)"
    environment = {**os.environ, "TMPDIR": str(folder)}  # the owner's death leaves the socket's folder behind
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    wait_until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


def facts() -> tuple[int, bool, str]:
    return os.getppid(), "colorsys" in sys.modules, os.environ["HOROVOD_RANK"]


@pytest.mark.parallel
def test_ranks_are_forks_where_the_server_fits_and_new_interpreters_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ForkServer(["colorsys"], {**os.environ, **rank_environment(1)})) as server:
        monkeypatch.setenv(FORK_SERVER_VARIABLE, server.address)
        quiet = {"on_log": lambda rank, line: None}
        assert BarrierRunner(None, 2, **quiet).run_all(facts) == [(server.process.pid, True, rank) for rank in "01"]
        new = BarrierRunner(None, 1, env={"KERAS_BACKEND": "tensorflow"}, **quiet).run_all(facts)
    assert new == BarrierRunner(None, 1, **quiet).run_all(facts) == [(os.getpid(), False, "0")]
