"""The fork server: an interpreter that has imported TensorFlow and forks processes in milliseconds.

Importing TensorFlow, Keras and Horovod takes ten seconds in every process. A server imports them once, at its first
request. Every later process is a fork of the server, and shares the imports and their memory. The server never runs
an operation of TensorFlow and never uses a GPU, because neither survives a fork.

A request is one message on a Unix socket: a module for `python -m`, its arguments, environment, working folder, signal
mask and descriptors. The answer is the process's number and pidfd, and later its exit code.
"""

import gc
import importlib
import json
import logging
import os
import random
import runpy
import selectors
import signal
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.launch.keras_door import hook
from pipelines.machine.proc import namespace

FORK_SERVER_VARIABLE = "GROUNDSWELL_FORK_SERVER"
"""The variable with the socket of this host's fork server; without it each rank is a new interpreter."""
_MAXIMUM_ANSWER = 1 << 12
_MAXIMUM_REQUEST = 1 << 18
_MAXIMUM_DESCRIPTORS = 16
_OUT_OF_MASK = frozenset({signal.SIGTERM, signal.SIGUSR1})
# The interpreter, the C library and these packages read these variables once, at their start. A process with other
# values must be a new interpreter.
_READ_AT_START = ("KERAS_", "LD_", "MALLOC_", "PYTHON", "TF_USE_LEGACY_KERAS")
# Spark's variables begin with PYTHON_. Spark sets PYTHONHASHSEED to 0 in its tasks, and so every fork has this value.
_READ_LATER = ("PYTHON_", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUNBUFFERED")
_WITH_THREADS = ("polars",)
"""Packages that start threads at their import and wait for them when the interpreter ends; MLflow imports polars."""


class RefusedError(RuntimeError):
    """The error when the server cannot fork a process because its imports or environment differ."""


class ForkServer:
    """A server that ends with the process that started it; its forked processes continue."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start the server; it imports nothing yet.

        Args:
            modules: Modules that the server imports at its first request.
            environment: Variables of the server; None: those of this process.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="groundswell-fork-")  # only its owner can enter it
        self.address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.launch.rank.fork_server", str(listener.fileno()), *modules],
                stdin=subprocess.PIPE,
                env={
                    **(environment or os.environ),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "PYTHONHASHSEED": "0",
                },
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the server."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self._folder.cleanup()


class ForkedProcess:
    """A process forked by a server, with the part of `subprocess.Popen` that the launcher uses."""

    def __init__(
        self,
        address: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int,
        output: int,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Request a process in a new session from a server, and wait until it exists.

        Args:
            address: The server's socket.
            module: Module that runs as with `python -m`.
            arguments: Arguments of the module; the numbers of `descriptors` follow them.
            environment: All variables of the process.
            stdin: Descriptor of its standard input.
            output: Descriptor of its standard output and error.
            descriptors: Further descriptors, which have other numbers in the process.

        Raises:
            RefusedError: The process would need another interpreter.
            OSError: The server is gone.
        """
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),  # noqa: PTH109  only a text is sent
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "home": _home(),
        }
        self.returncode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(address)
            socket.send_fds(self._socket, [json.dumps(request).encode()], [stdin, output, *descriptors])
            # The process itself sends its pidfd: when its number arrives, it may have ended.
            data, pidfds, *_ = socket.recv_fds(self._socket, _MAXIMUM_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
            answer = data.decode()
            if not answer.isdecimal():
                raise RefusedError(f"the fork server at {address} cannot fork this process: {answer or 'it has ended'}")
            self.pid, self._pidfd = int(answer), pidfds[0]
        except BaseException:
            self._socket.close()
            raise

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal that ended the process; None while it runs."""
        return self._ended(socket.MSG_DONTWAIT)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        Raises:
            TimeoutError: The process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            self._socket.settimeout(timeout)
        code = self._ended(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send the process a signal if it still runs."""
        if self.poll() is None:
            self._signal(number)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _ended(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                answer = self._socket.recv(_MAXIMUM_ANSWER, flags)
            except BlockingIOError:
                return None
            if answer:
                self.returncode = int(answer)
            else:  # the server is gone: the exit code of the process cannot become known
                self._signal(signal.SIGKILL)
                self.returncode = -signal.SIGKILL
            self._socket.close()
            os.close(self._pidfd)
        return self.returncode


def main() -> int | None:
    """Serve; in a forked process, return the result of its module."""
    listener, modules = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _OUT_OF_MASK)  # a fork must not miss one before it has a handler
    logging.basicConfig()  # otherwise TensorFlow adds its own handler to its logger
    request = _ForkingServer(listener, modules).serve()
    return None if request is None else _run(*request)


class _ForkingServer:
    """Forks a process for each request, and sends its exit code."""

    def __init__(self, listener: socket.socket, modules: Sequence[str]) -> None:
        self._listener, self._modules = listener, modules
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return None when the owner has ended, and in each forked process its request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is self._listener:
                    self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                elif key.data is not None:
                    self._pass_on_the_end(key)
                elif (request := self._fork_for(key.fileobj)) is not None:
                    return request

    def _fork_for(self, connection: Any) -> tuple[dict[str, Any], list[int]] | None:
        """Fork for a connection's request; return the request in the new process, None in this one."""
        self._selector.unregister(connection)
        data, descriptors, *_ = socket.recv_fds(connection, _MAXIMUM_REQUEST, _MAXIMUM_DESCRIPTORS)
        request = json.loads(data) if data else None
        if request is None or (difference := _difference(request)):
            if request is not None:
                connection.send(difference.encode())
            connection.close()
        else:
            _import(self._modules)
            gc.freeze()  # otherwise the garbage collector of a fork would copy every shared page
            pid = os.fork()
            if pid == 0:
                os.setsid()
                pidfd = os.pidfd_open(os.getpid())
                socket.send_fds(connection, [str(os.getpid()).encode()], [pidfd])
                os.close(pidfd)
                connection.close()
                self._close_all()
                return request, descriptors
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _close_all(self) -> None:
        """Close the server's files and objects: a later `close` would close another file with the same number."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.data is not None:
                os.close(key.fd)
                key.data[1].close()
        self._selector.close()

    def _pass_on_the_end(self, key: selectors.SelectorKey) -> None:
        pid, connection = key.data
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):  # the client no longer waits for it
            connection.send(str(code).encode())
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
        connection.close()


def _import(names: Sequence[str]) -> None:
    """Import modules, except packages with threads, which a fork lacks; a fork imports those at first use."""
    if not all(name in sys.modules for name in names):
        hook.install()  # repairs Horovod at its import
        for name in _WITH_THREADS:
            sys.modules[name] = None  # type: ignore[assignment]  # as if not installed
        for name in names:
            importlib.import_module(name)
        for name in _WITH_THREADS:
            del sys.modules[name]


def _home() -> str:
    """Return the location of code and packages, and the network namespace of this process."""
    return f"{sys.prefix}, {Path(__file__).parent}, {namespace('net')}"


def _difference(request: dict[str, Any]) -> str:
    """Return why a fork of this process cannot satisfy the request; empty if it can."""
    own, wanted = (_read_at_start(each) for each in (os.environ, request["environment"]))
    names = sorted(name for name, value in own.items() ^ wanted.items())
    if names:
        return f"another value of {', '.join(dict.fromkeys(names))}"
    return "" if request["home"] == _home() else f"it belongs to {request['home']}"


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
    }


def _run(request: dict[str, Any], descriptors: Sequence[int]) -> int | None:
    """Become the requested process, and run its module."""
    stdin, output, *others = descriptors
    for descriptor, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    for descriptor in {stdin, output}:
        os.close(descriptor)
    own_path = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    wanted_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, wanted_path), *(entry for entry in sys.path if entry not in own_path)]
    for packages in site.getsitepackages():  # they are already in the server's path
        site.addsitedir(packages)
    sys.argv = [request["module"], *request["arguments"], *map(str, others)]
    os.chdir(request["folder"])
    # Reset the state to that of a new interpreter: random numbers, log handlers and the temporary folder.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    logging.root.handlers.clear()
    tempfile.tempdir = None
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
