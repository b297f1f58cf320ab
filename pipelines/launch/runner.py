"""One Horovod rank per task of a Spark barrier stage, or per process of this machine, in one or several attempts."""

import io
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import cloudpickle
from pyspark.sql import SparkSession

from pipelines.launch.barrier_tasks import BarrierTasks
from pipelines.launch.channel import DriverChannel, ResultLostError
from pipelines.launch.failure import InfrastructureError, StartError, WorkerError
from pipelines.launch.jvm import naming_a_dead_jvm
from pipelines.launch.listener import Listener, LogToDriver
from pipelines.launch.local_tasks import LOOPBACK, LocalTasks
from pipelines.launch.messages import Go, JsonObject
from pipelines.launch.placement import Placement, place
from pipelines.launch.policy import Attempt, RetryPolicy
from pipelines.launch.preflight import (
    check_cluster,
    check_encryption,
    check_session,
    check_tasks,
    count_slots,
    driver_addresses,
    drop_lost_executors,
)
from pipelines.launch.process import THREAD_VARIABLES
from pipelines.launch.rendezvous import RendezvousServer
from pipelines.launch.report import ATTEMPT_VARIABLE
from pipelines.launch.supervisor import Limits, Supervisor
from pipelines.launch.task import Launch, RankResult
from pipelines.launch.termination import Termination, delayed_sigterm

__all__ = ["Attempt", "BarrierRunner", "InfrastructureError", "LogToDriver", "StartError", "WorkerError"]

_log = logging.getLogger(__name__)


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
        description: str = "groundswell ranks",
        log_to_driver: LogToDriver = "all",
        log_folder: Path | None = None,
        start_timeout: float = 300,
        hang_timeout: float | None = None,
        stop_grace: float = 60,
        retries: int = 0,
        retry_wait: float = 5,
        allowed_sizes: Sequence[int] = (),
        accept_unencrypted: bool = False,
        on_log: Callable[[int, str], None] | None = None,
        on_report: Callable[[JsonObject], None] | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
        on_ready: Callable[[Attempt], None] | None = None,
    ) -> None:
        """Describe the job; nothing starts yet.

        Args:
            spark: Classic session whose executors have this package installed; None: processes of this machine.
            num_workers: Number of ranks, one per Spark task.
            gpus_per_worker: Number of GPUs that each rank sees, of those that Spark gives its task.
            threads_per_worker: Number of TensorFlow's threads in each rank; None: the cores of its Spark task.
            env: Further variables of the ranks' processes.
            description: Shown with the job in Spark's web page.
            log_to_driver: Which lines of the ranks are shown: all, rank 0's, only what they pass to
                `pipelines.launch.report.log_to_driver`, or none. A flood of lines is shown in part.
            log_folder: Gets the whole log of each rank as `rank-<n>.log`; further attempts are appended.
            start_timeout: Seconds that ranks wait for each other: to start, and for Gloo in one operation.
            hang_timeout: Seconds without any `report`, `step_done` or `log_to_driver` after which a rank counts as
                hung, and the attempt ends. Imports and the first step must fit too. None: a rank may be silent for
                ever.
            stop_grace: Seconds that ranks have to end after they were asked to; see
                `pipelines.launch.report.stop_requested`.
            retries: Number of further attempts. Only infrastructure failures are retried: a dead process, executor or
                host, or a hang. Exceptions from your function are not.
            retry_wait: Seconds before the first further attempt; doubled for each that follows, up to 300.
            allowed_sizes: Numbers of ranks that a further attempt may have when slots are lost; the largest that
                fits is taken. Empty: `num_workers` only.
            accept_unencrypted: Run although Spark is told to encrypt or authenticate; the error says what is not.
            on_log: Called with `(rank, line)` for each line that is shown, instead of printing it.
            on_report: Called with what ranks pass to `pipelines.launch.report.report`, and their `rank`.
            on_attempt: Called before each attempt, when its ranks are about to start.
            on_ready: Called when all ranks of an attempt have started, before they call the function.

        Raises:
            ValueError: A value is out of range, or the session is one of Spark Connect.
        """
        check_session(spark)
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: at least one worker is needed")
        if log_to_driver not in get_args(LogToDriver):
            raise ValueError(f"log_to_driver={log_to_driver!r} is not one of {', '.join(get_args(LogToDriver))}")
        if retries < 0:
            raise ValueError(f"retries={retries} is negative")
        if stop_grace < 0:
            raise ValueError(f"stop_grace={stop_grace} is negative")
        self._spark = spark
        self._num_workers, self._gpus_per_worker = num_workers, gpus_per_worker
        threads = dict.fromkeys(THREAD_VARIABLES, str(threads_per_worker)) if threads_per_worker else {}
        self._env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(start_timeout)), **threads, **(env or {})}
        self._description = description
        self._limits = Limits(start_timeout, hang_timeout, stop_grace)
        self._policy = RetryPolicy(retries, retry_wait, tuple(allowed_sizes))
        self._accept_unencrypted = accept_unencrypted
        self._log_to_driver, self._log_folder = log_to_driver, log_folder
        self._on_log = on_log or _print_line
        self._on_report = on_report or (lambda report: None)
        self._on_attempt = on_attempt or (lambda attempt: None)
        self._on_ready = on_ready or (lambda attempt: None)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` on every rank; return rank 0's value, which may have any size.

        The values of other ranks are not sent.

        Raises:
            ValueError: The function or an argument cannot be pickled.
            RuntimeError: The cluster cannot place the ranks.
            WorkerError: The function raised an exception in a rank.
            InfrastructureError: A rank died, hung, was lost or did not start, in the last attempt.
        """
        return self._run(function, args, kwargs, wanted=1)[0]

    def run_all(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `run`, but return every rank's value, in rank order."""
        return self._run(function, args, kwargs, wanted=None)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], wanted: int | None
    ) -> list[Any]:
        """The values of the first `wanted` ranks, or of all."""
        try:
            payload = cloudpickle.dumps((function, args, kwargs))
        except Exception as error:  # whatever a __reduce__ raises
            raise ValueError(f"the function or an argument cannot be sent to the workers: {error}") from error
        with naming_a_dead_jvm(self._spark.sparkContext if self._spark is not None else None):
            attempt = Attempt(1, self._num_workers)
            if self._spark is not None:
                check_encryption(self._spark, self._accept_unencrypted)
                check_cluster(self._spark, attempt.num_workers, self._gpus_per_worker)
            while True:
                self._on_attempt(attempt)
                try:
                    with delayed_sigterm() as termination:
                        return self._attempt(payload, attempt, wanted or attempt.num_workers, termination)
                except InfrastructureError as error:
                    if not self._policy.retries_after(attempt, error):
                        raise
                    attempt = self._next(attempt, error)

    def _next(self, attempt: Attempt, error: InfrastructureError) -> Attempt:
        """Wait, and return the attempt after a failed one, with the slots that are left."""
        seconds, reason = self._policy.wait_seconds(attempt), str(error).splitlines()[0]
        _log.warning("attempt %d: %s; the next one in %g s", attempt.number, reason, seconds)
        time.sleep(seconds)
        size: int | None = self._num_workers
        if self._spark is not None:
            drop_lost_executors(self._spark)
            slots = count_slots(self._spark, self._num_workers)
            size = self._policy.size(self._num_workers, slots)
            if size is None:
                raise error
            if size < self._num_workers:
                _log.warning("%d slots are left: the run continues with %d workers", slots, size)
        assert size is not None
        return Attempt(attempt.number + 1, size, reason)

    def _attempt(self, payload: bytes, attempt: Attempt, wanted: int, termination: Termination) -> list[Any]:
        host, bind = (LOOPBACK, LOOPBACK) if self._spark is None else driver_addresses(self._spark)
        with ExitStack() as stack:
            channel = DriverChannel(host, bind)
            stack.callback(channel.close)
            keep_rendezvous = self._env.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("0", "")
            rendezvous = RendezvousServer(
                bind, attempt.num_workers, lambda address: address in channel.peers, stay_open=keep_rendezvous
            )
            stack.callback(rendezvous.close)
            tasks = self._start_tasks(channel, payload, attempt)
            stack.callback(tasks.close)
            listener = self._listener(attempt)
            stack.callback(listener.close)
            supervisor = Supervisor(channel, tasks, attempt.num_workers, listener, self._limits)
            stack.callback(supervisor.close)
            termination.request = supervisor.request_stop
            try:
                hellos = supervisor.gather()
                check_tasks(hellos)
                self._on_ready(attempt)
                extra = {
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous.port),
                    ATTEMPT_VARIABLE: str(attempt.number),
                }
                placements = place([hello.host for hello in hellos])
                supervisor.go([Go(p.rank, p.environment() | extra, p.rank < wanted) for p in placements])
                supervisor.watch()
                return _values(channel, tasks.results(), placements, wanted)
            except BaseException:
                supervisor.stop()
                tasks.cancel()
                raise

    def _start_tasks(self, channel: DriverChannel, payload: bytes, attempt: Attempt) -> BarrierTasks | LocalTasks:
        limits = self._limits
        launch = Launch(channel.address, self._gpus_per_worker, limits.start, limits.stop_grace, payload, self._env)
        if self._spark is None:
            return LocalTasks(attempt.num_workers, launch)
        description = self._description + (f" (attempt {attempt.number})" if attempt.number > 1 else "")
        return BarrierTasks(self._spark, attempt.num_workers, launch, description)

    def _listener(self, attempt: Attempt) -> Listener:
        listener = Listener(self._log_to_driver, self._on_log, self._on_report, self._log_folder)
        if attempt.number > 1:
            for rank in range(attempt.num_workers):
                listener.heading(rank, f"--- attempt {attempt.number}, after: {attempt.after}")
        return listener


def _values(
    channel: DriverChannel, results: Sequence[RankResult], placements: Sequence[Placement], wanted: int
) -> list[Any]:
    """The return values of the first `wanted` ranks."""
    by_rank = {result.rank: result for result in results}
    tasks = {placement.rank: task for task, placement in enumerate(placements)}
    values = []
    for rank in range(wanted):
        if rank not in by_rank:
            raise InfrastructureError(f"rank {rank} has finished, but Spark has lost what its task returned")
        small = by_rank[rank].value
        try:
            values.append(cloudpickle.load(channel.result(tasks[rank]) if small is None else io.BytesIO(small)))
        except ResultLostError as error:
            raise InfrastructureError(f"rank {rank} has finished, but {error}") from error
    return values


def _print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)  # noqa: T201  the driver's console is where users look
