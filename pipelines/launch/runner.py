"""One Horovod worker per task of a Spark barrier stage, or per process of this machine; several attempts."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cloudpickle
from pyspark.sql import SparkSession

from pipelines.launch.channel import DriverChannel, Message
from pipelines.launch.failure import InfrastructureError, RankLostError, WorkerError
from pipelines.launch.logs import RankLogs, Throttle
from pipelines.launch.placement import place
from pipelines.launch.preflight import (
    check_cluster,
    check_encryption,
    check_tasks,
    count_slots,
    driver_addresses,
    drop_lost_executors,
)
from pipelines.launch.process import THREAD_VARIABLES
from pipelines.launch.rendezvous import RendezvousServer
from pipelines.launch.report import ATTEMPT_VARIABLE
from pipelines.launch.stage import LOOPBACK, LocalStage, SparkStage
from pipelines.launch.supervisor import Supervisor
from pipelines.launch.task import Launch

__all__ = ["Attempt", "BarrierRunner", "InfrastructureError", "LogToDriver", "WorkerError"]

LogToDriver = Literal["all", "rank0", "callback", "none"]
_LOG_CHOICES = ("all", "rank0", "callback", "none")
_MAXIMUM_WAIT_SECONDS = 300.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One try at a job."""

    number: int
    """From 1; the function has it from `pipelines.launch.report.attempt`."""
    num_workers: int
    after: str = ""
    """Why the one before failed, in a line."""


class BarrierRunner:
    """Runs a function on every rank of a Horovod job inside one Spark barrier stage."""

    def __init__(
        self,
        spark: SparkSession | None,
        num_workers: int,
        *,
        gpus_per_worker: int = 0,
        threads_per_worker: int | None = None,
        env: dict[str, str] | None = None,
        log_to_driver: LogToDriver = "all",
        log_folder: Path | None = None,
        start_timeout: float = 300,
        hang_timeout: float | None = None,
        retries: int = 0,
        retry_wait: float = 5,
        allowed_sizes: Sequence[int] = (),
        accept_unencrypted: bool = False,
        on_log: Callable[[int, str], None] | None = None,
        on_report: Callable[[Message], None] | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
    ) -> None:
        """Describe the job; nothing starts yet.

        Args:
            spark: Session whose executors have this package installed; None: processes of this machine.
            num_workers: Ranks, one per Spark task.
            gpus_per_worker: GPUs that each rank sees, out of those that Spark gives its task.
            threads_per_worker: TensorFlow's threads in each rank; None: the cores of its Spark task.
            env: Further variables of the worker processes.
            log_to_driver: Which lines of the ranks are shown: all, rank 0's, only what they pass to
                `pipelines.launch.report.log_to_driver`, or none. More than a person can read is left out.
            log_folder: Gets the whole log of each rank as `rank-<n>.log`; later attempts are added to it.
            start_timeout: Seconds that ranks wait for each other: to start, and for Gloo in one operation.
            hang_timeout: Seconds without any report, `step_done` or `log_to_driver` after which a rank is held to hang
                and the attempt is ended; the first step, with its imports, must fit too. None: never.
            retries: Further attempts after a failure that no exception of the function explains: a process or an
                executor that died, a hang, a lost connection.
            retry_wait: Seconds before the first further attempt; doubled for each that follows, up to 300.
            allowed_sizes: Numbers of ranks that a further attempt may have where slots are lost: the largest that
                fits. Empty: `num_workers` only.
            accept_unencrypted: Run although Spark was told to encrypt or authenticate; see the error for what is not.
            on_log: Called with `(rank, line)` for each line that is shown, instead of printing it.
            on_report: Called with what workers pass to `pipelines.launch.report.report`, and their rank.
            on_attempt: Called before each attempt.

        Raises:
            ValueError: A value out of range.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: at least one worker is needed")
        if log_to_driver not in _LOG_CHOICES:
            raise ValueError(f"log_to_driver={log_to_driver!r} is not one of {', '.join(_LOG_CHOICES)}")
        if retries < 0:
            raise ValueError(f"retries={retries} is negative")
        self._spark = spark
        self._num_workers = num_workers
        self._gpus_per_worker = gpus_per_worker
        threads = dict.fromkeys(THREAD_VARIABLES, str(threads_per_worker)) if threads_per_worker else {}
        self._env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(start_timeout)), **threads, **(env or {})}
        self._start_timeout, self._hang_timeout = start_timeout, hang_timeout
        self._retries, self._retry_wait = retries, retry_wait
        self._allowed_sizes = sorted(allowed_sizes)
        self._accept_unencrypted = accept_unencrypted
        self._log_to_driver, self._log_folder = log_to_driver, log_folder
        self._on_log = on_log or _print_line
        self._on_report = on_report or (lambda message: None)
        self._on_attempt = on_attempt or (lambda attempt: None)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` on every rank; rank 0's value.

        Raises:
            ValueError: The function or an argument cannot be pickled.
            RuntimeError: The cluster cannot place the ranks.
            WorkerError: The function raised an exception in a rank.
            InfrastructureError: A rank died, hung, was lost or did not start, in the last attempt.
        """
        return self.run_all(function, *args, **kwargs)[0]

    def run_all(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `run`; every rank's value, in rank order."""
        try:
            payload = cloudpickle.dumps((function, args, kwargs))
        except Exception as error:  # whatever a __reduce__ raises
            raise ValueError(f"the function or an argument cannot be sent to the workers: {error}") from error
        attempt = Attempt(1, self._num_workers)
        if self._spark is not None:
            check_encryption(self._spark, self._accept_unencrypted)
            check_cluster(self._spark, attempt.num_workers, self._gpus_per_worker)
        while True:
            self._on_attempt(attempt)
            try:
                return self._attempt(payload, attempt)
            except InfrastructureError as error:
                if attempt.number > self._retries:
                    raise
                attempt = self._next(attempt, error)

    def _next(self, attempt: Attempt, error: InfrastructureError) -> Attempt:
        """The attempt after a failed one, when its time has come and with the slots that are left."""
        seconds = min(self._retry_wait * 2 ** (attempt.number - 1), _MAXIMUM_WAIT_SECONDS)
        reason = str(error).splitlines()[0]
        _log.warning("attempt %d: %s; the next one in %g s", attempt.number, reason, seconds)
        time.sleep(seconds)
        size = self._num_workers
        if self._spark is not None:
            drop_lost_executors(self._spark)
            slots = count_slots(self._spark, size)
            fitting = [allowed for allowed in self._allowed_sizes if allowed <= slots]
            if slots < size:
                if not fitting:
                    raise error
                size = fitting[-1]
                _log.warning("%d slots are left: going on with %d workers", slots, size)
        return Attempt(attempt.number + 1, size, reason)

    def _attempt(self, payload: bytes, attempt: Attempt) -> list[Any]:
        host, bind = (LOOPBACK, LOOPBACK) if self._spark is None else driver_addresses(self._spark)
        with ExitStack() as stack:
            channel = DriverChannel(host, bind)
            stack.callback(channel.close)
            keep_rendezvous = self._env.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("0", "")
            rendezvous = RendezvousServer(
                bind, attempt.num_workers, lambda address: address in channel.peers, stay_open=keep_rendezvous
            )
            stack.callback(rendezvous.close)
            launch = Launch(channel.address, self._gpus_per_worker, self._start_timeout, payload, self._env)
            stage = (
                LocalStage(attempt.num_workers, launch)
                if self._spark is None
                else SparkStage(self._spark, attempt.num_workers, launch)
            )
            stack.callback(stage.close)
            listener = _Listener(self._log_to_driver, self._on_log, self._on_report, self._log_folder, attempt)
            stack.callback(listener.close)
            supervisor = Supervisor(
                channel,
                stage,
                attempt.num_workers,
                listener,
                start_timeout=self._start_timeout,
                hang_timeout=self._hang_timeout,
            )
            try:
                hellos = supervisor.gather()
                check_tasks(hellos)
                placements = place([hello["host"] for hello in hellos])
                extra = {
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous.port),
                    ATTEMPT_VARIABLE: str(attempt.number),
                }
                supervisor.go([p.rank for p in placements], [p.environment() | extra for p in placements])
                supervisor.watch()
                results = stage.results()
            except (WorkerError, RankLostError):
                raise
            except BaseException:
                supervisor.stop()  # and `stage.close` ends what does not hear it
                raise
        return [cloudpickle.loads(results[rank]) for rank in range(attempt.num_workers)]


class _Listener:
    """Shows and saves what the ranks say."""

    def __init__(
        self,
        choice: LogToDriver,
        show: Callable[[int, str], None],
        report: Callable[[Message], None],
        folder: Path | None,
        attempt: Attempt,
    ) -> None:
        self._choice, self._show, self.report = choice, show, report
        self._throttle = Throttle(show)
        self._logs = RankLogs(folder) if folder is not None else None
        if self._logs is not None and attempt.number > 1:
            for rank in range(attempt.num_workers):
                self._logs.write(rank, [f"--- attempt {attempt.number}, after: {attempt.after}"])

    def lines(self, rank: int, lines: list[str]) -> None:
        if self._logs is not None:
            self._logs.write(rank, lines)
        if self._choice == "all" or (self._choice == "rank0" and rank == 0):
            self._throttle.write(rank, lines)

    def callback(self, rank: int, line: str) -> None:
        if self._logs is not None:
            self._logs.write(rank, [line])
        if self._choice != "none":
            self._show(rank, line)

    def close(self) -> None:
        self._throttle.close()
        if self._logs is not None:
            self._logs.close()


def _print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)  # noqa: T201  the driver's console is where users look
