"""The code of one task: it owns the rank's process, forwards messages and follows the driver's orders."""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait

from pipelines.launch.rank.host import TaskResources, hello_of, probe_port, visible_gpus
from pipelines.launch.rank.processes import RankProcesses
from pipelines.launch.rank.rank_main import FunctionHeader
from pipelines.launch.wire.channel import ChannelAddress
from pipelines.launch.wire.link import TaskLink
from pipelines.launch.wire.messages import (
    EndProcess,
    FunctionFailure,
    FunctionReturned,
    Join,
    ProcessDied,
    ProcessExit,
    ReadyToJoin,
    Report,
    RunRank,
    SendStacks,
    SignOfLife,
    SigtermReceived,
    Stacks,
    StepDone,
    Stop,
    StopSoon,
    decode,
)

_LOOK_SECONDS = 0.1
_SPARE_SECONDS = 30.0
"""Seconds from a rejoin to the start of the next spare, if the function gives no sign of life earlier."""
FAILED_SECONDS = 10.0
"""Seconds that a process may take to end after its function has raised."""
_FLUSH_SECONDS = 30.0
_FAILURE_FLUSH_SECONDS = 3.0
_RECONNECTION_SECONDS = 2.5
"""Seconds that a finished rank waits for a broken channel; shorter than the silence after which the driver asks."""
_LAST_WORD_SECONDS = 20.0
_RESULT_SECONDS = 60.0
_MAXIMUM_TEXT = 1 << 16
# Spark keeps several copies of tasks' results in its JVM, whose heap is 1 GiB by default.
_SPARK_RESULT_BYTES = 1 << 20


@dataclass(frozen=True)
class TaskInput:
    """The input of every task of one attempt."""

    channel: ChannelAddress
    gpus_per_worker: int
    start_timeout: float
    stop_grace: float
    payload: bytes = field(repr=False)
    """Pickled `(function, args, kwargs)`."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    spares: bool = False
    """Whether each task has a spare process."""
    fork_server: str | None = None
    """Socket of the `fork_server` for ranks without a GPU; None: each rank is a new interpreter."""


@dataclass(frozen=True)
class RankResult:
    """The result of a task when its rank has finished."""

    rank: int
    value: bytes | None
    """The pickled return value; None if it was too large for Spark and was sent on the channel."""


class RankFailedError(RuntimeError):
    """The error of a failed rank whose failure the driver may not know."""


def run_task(
    task_input: TaskInput, resources: TaskResources, is_cancelled: Callable[[], bool] = lambda: False
) -> RankResult | None:
    """Run this task's rank to its end; return None if the driver has stopped it or knows how it failed.

    Args:
        task_input: Input of every task.
        resources: Location of this task.
        is_cancelled: Returns whether the driver will send no order; called until its first order arrives.

    Raises:
        RankFailedError: The rank failed, and the driver does not answer.
        RuntimeError: Its return value did not reach the driver.
    """
    devices, complaint = visible_gpus(resources, task_input.gpus_per_worker)
    environment = {"CUDA_VISIBLE_DEVICES": devices, **task_input.environment}
    server = None if task_input.gpus_per_worker else task_input.fork_server
    processes = RankProcesses(environment, resources.cores, spares=task_input.spares, fork_server=server)
    with ExitStack() as stack:
        stack.callback(processes.close)
        stack.callback(processes.end)
        port = stack.enter_context(probe_port(resources.host))
        link = TaskLink(task_input.channel, hello_of(resources, port, devices, complaint), processes.log)
        stack.callback(link.close)
        stack.callback(processes.end)  # before the link closes, which sends the end of the log
        go = _first_order(link, task_input.start_timeout, is_cancelled)
        if go is None:
            return None
        rank = _RunningRank(processes, link, go.rank, task_input.stop_grace)
        return rank.run(FunctionHeader(go.environment, go.wants_result), task_input.payload)


def _first_order(link: TaskLink, seconds: float, is_cancelled: Callable[[], bool]) -> RunRank | None:
    """Return the driver's order once all tasks have connected; None if it is no `RunRank` or none arrives."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_cancelled():
        with suppress(queue.Empty):
            order = link.orders.get(timeout=_LOOK_SECONDS)
            return order if isinstance(order, RunRank) else None
    return None


class _RunningRank:
    """A rank from the call of its function to the end of its process."""

    def __init__(self, processes: RankProcesses, link: TaskLink, rank: int, stop_grace: float) -> None:
        self._processes, self._link, self._rank, self._stop_grace = processes, link, rank, stop_grace
        self._process = processes.current
        self._returned = self._stopped = False
        self._failure: FunctionFailure | None = None
        self._failed_at: float | None = None
        self._stop_deadline: float | None = None
        self._spare_due: float | None = None
        self._joins = 0
        self._is_ready = False
        self._join: Join | None = None
        self._terminated = threading.Event()

    def run(self, header: FunctionHeader, payload: bytes) -> RankResult | None:
        """Start the function, and forward messages until the process has ended or must end; then report how it ended.

        Raises:
            RankFailedError: The rank failed, and the driver does not answer.
            RuntimeError: Its return value did not reach the driver.
        """
        with _on_sigterm(self._terminated.set):
            self._processes.begin(header, payload)
            while not self._stopped:
                ready = wait([self._process.reader], _LOOK_SECONDS)
                # A child of the rank may still hold the pipe open, so the end of the process itself counts too.
                running = self._process.running()
                until = time.monotonic() + _LOOK_SECONDS
                try:
                    # The rank may send faster than this loop reads, so the loop also has to follow the driver's orders.
                    while (not running or time.monotonic() < until) and self._process.reader.poll():
                        self._take(self._process.reader.recv_bytes())
                except (EOFError, OSError):
                    if running and ready:
                        time.sleep(_LOOK_SECONDS / 10)  # the pipe ends a moment before the process
                if not running and not self._is_replaced():
                    break
                if self._failed_at is not None and time.monotonic() > self._failed_at + FAILED_SECONDS:
                    break  # a thread of the function keeps the process alive, and the other ranks wait for it
                self._obey()
        return self._end()

    def _is_replaced(self) -> bool:
        """Let the spare take the place of a process that died by itself; return whether it did."""
        raised, asked = self._failure is not None, self._stop_deadline is not None
        if raised or asked or self._returned or self._stopped or not self._processes.can_replace:
            return False
        dead, self._spare_due, self._is_ready = self._processes.replace(), None, False
        lines = self._processes.log.last_lines()
        self._link.send(ProcessDied(dead.death(), dead.exit_code, dead.faults(), lines))
        self._process = self._processes.current
        return True

    def _take(self, frame: bytes) -> None:
        message, _ = decode(frame)
        if isinstance(message, FunctionFailure):
            self._failed_at = time.monotonic()
            self._failure = replace(
                message, message=message.message[-_MAXIMUM_TEXT:], traceback=message.traceback[-_MAXIMUM_TEXT:]
            )
        elif isinstance(message, FunctionReturned):
            self._returned = True
        elif isinstance(message, ReadyToJoin):
            self._link.send(replace(message, joins=self._joins))
            self._is_ready = True
            self._hand_over_join()
        elif isinstance(message, SignOfLife):
            self._link.send(message)
            if self._spare_due is not None and isinstance(message, Report | StepDone):
                self._prepare_spare()

    def _hand_over_join(self) -> None:
        """Send the join order to the process once it is ready; a spare that just took over may not be ready yet."""
        if self._join is None or not self._is_ready:
            return
        self._process.order(self._join)
        # After a death, starting the next spare would take cores from the next step, for which all ranks wait.
        self._spare_due = time.monotonic() + (_SPARE_SECONDS if self._joins else 0)
        self._joins += 1
        self._join, self._is_ready = None, False

    def _prepare_spare(self) -> None:
        self._spare_due = None
        self._processes.prepare_spare()

    def _obey(self) -> None:
        """Follow the driver's orders, and end a rank whose grace period is over."""
        if self._terminated.is_set() and self._stop_deadline is None:
            self._link.send(SigtermReceived())
            self._request_stop()
        while not self._link.orders.empty():
            match self._link.orders.get():
                case Stop():
                    self._stopped = True
                case StopSoon():
                    self._request_stop()
                case SendStacks():
                    self._link.send(Stacks(self._process.stacks()))
                case EndProcess():
                    self._process.end()
                case Join() as join:
                    self._join = join
                    self._hand_over_join()
        if self._spare_due is not None and time.monotonic() > self._spare_due and self._stop_deadline is None:
            self._prepare_spare()
        if self._stop_deadline is not None and time.monotonic() > self._stop_deadline:
            self._stopped = True

    def _request_stop(self) -> None:
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + self._stop_grace
            self._process.request_stop()

    def _end(self) -> RankResult | None:
        process, link = self._process, self._link
        self._processes.end()
        faults, last_lines = process.faults(), process.log.last_lines()
        if faults and not self._stopped:
            process.log.write(f"\n{faults}\n")
        code = process.exit_code
        good = self._returned and code == 0 and not self._stopped
        result = self._send_result() if good else None
        link.flush(_FLUSH_SECONDS if good else _FAILURE_FLUSH_SECONDS)
        link.send(ProcessExit(self._stopped, self._returned, code, process.death(), faults, self._failure, last_lines))
        # If the driver does not receive the end, it counts the rank as lost while the others still work.
        link.flush(_FAILURE_FLUSH_SECONDS, reconnect=_RECONNECTION_SECONDS if good else 0)
        # The first failed task ends Spark's stage, and Spark then kills the others: let them report first. If the
        # driver has reported the failure, this task frees its slot at once, and Spark prints no trace of it.
        # If all ranks were asked to stop, others may need the whole grace period, and end without this one.
        seconds = _LAST_WORD_SECONDS + (self._stop_grace if self._stop_deadline is not None else 0)
        if good or self._stopped or _wait_for_stop(link, seconds):
            return result
        said = self._failure.traceback if self._failure else "\n".join(last_lines)
        raise RankFailedError(f"rank {self._rank} failed: {process.death()}\n{said}")

    def _send_result(self) -> RankResult:
        file = self._process.result
        size = os.fstat(file.fileno()).st_size
        if size <= _SPARK_RESULT_BYTES:
            return RankResult(self._rank, os.pread(file.fileno(), size, 0))
        if not self._link.send_result(file, _RESULT_SECONDS):
            raise RuntimeError(
                f"rank {self._rank} has finished, but its return value of {size:,} bytes did not reach the driver"
            )
        return RankResult(self._rank, None)


@contextmanager
def _on_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` at SIGTERM; tasks in threads of the driver leave the signal to the driver."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wait_for_stop(link: TaskLink, seconds: float) -> bool:
    """Wait until the driver needs nothing more; return False if it cannot be reached."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if isinstance(link.orders.get(timeout=_LOOK_SECONDS), Stop):
                return True
        except queue.Empty:
            if not link.connected:
                return False
    return False
