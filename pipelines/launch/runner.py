"""Runs a Horovod rank per task of a Spark barrier stage, or per local process, in one or several attempts."""

import io
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import cloudpickle
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from pipelines.launch.driver.barrier_tasks import BarrierTasks
from pipelines.launch.driver.failure import InfrastructureError, RankLostError, SparkGoneError, StartError, WorkerError
from pipelines.launch.driver.joining import JoinRounds
from pipelines.launch.driver.local_tasks import LOOPBACK, LocalTasks
from pipelines.launch.driver.placement import Placement, devices_of_hosts, place
from pipelines.launch.driver.preflight import (
    check_cluster,
    check_encryption,
    check_session,
    check_tasks,
    count_slots,
    driver_addresses,
    drop_lost_executors,
)
from pipelines.launch.driver.rank_output import LogToDriver, RankOutput
from pipelines.launch.driver.supervisor import Supervisor
from pipelines.launch.driver.termination import Termination, delayed_sigterm
from pipelines.launch.policy import Attempt, RetryPolicy, TimeLimits
from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE
from pipelines.launch.rank.membership import CYCLE_TIME
from pipelines.launch.rank.process import THREAD_VARIABLES, inherited_settings
from pipelines.launch.rank.report import ATTEMPT_VARIABLE
from pipelines.launch.rank.task import RankResult, TaskInput
from pipelines.launch.wire.channel import DriverChannel, ResultLostError
from pipelines.launch.wire.messages import JsonObject, RunRank
from pipelines.launch.wire.rendezvous import Rendezvous
from pipelines.machine.console import counted, printable
from pipelines.machine.notebook import quieten_spark
from pipelines.machine.proc import allow_open_files
from pipelines.machine.versions import imported_version
from pipelines.spark.session import is_jvm_gone
from pipelines.storage.locations import local_path

__all__ = ["Attempt", "BarrierRunner", "InfrastructureError", "LogToDriver", "StartError", "WorkerError"]

_OWN_OPEN_FILES = 200
_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_OWN_VERSION = imported_version()  # read now: ranks are new processes and import the files later
_log = logging.getLogger(__name__)


class BarrierRunner:
    """Runs a function on every rank of a Horovod job inside one Spark barrier stage."""

    def __init__(
        self,
        spark: SparkSession | None,
        num_workers: int,
        *,
        gpus_per_worker: int = 0,
        picks_gpu: bool = False,
        threads_per_worker: int | None = None,
        env: dict[str, str] | None = None,
        description: str = "groundswell ranks",
        log_to_driver: LogToDriver = "all",
        log_folder: str | Path | None = None,
        start_timeout: float = 300,
        exchange_timeout: float | None = None,
        hang_timeout: float | None = None,
        stop_grace: float = 60,
        retries: int = 0,
        retry_wait: float = 5,
        allowed_sizes: Sequence[int] = (),
        spares: bool = False,
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
            picks_gpu: Whether the function picks the GPU at its local rank, as functions for HorovodRunner do. Each
                rank then sees the GPUs of all ranks of its host, in the order of local ranks, if each rank has one.
            threads_per_worker: Number of TensorFlow's threads in each rank; None: the cores of its Spark task.
            env: Further variables of the ranks' processes. They also get the driver's variables that begin with
                `HOROVOD_` or `NCCL_`, `KERAS_BACKEND`, `TF_USE_LEGACY_KERAS`, and MLflow's address and credentials
                (`MLFLOW_TRACKING_*`, `DATABRICKS_HOST`, `DATABRICKS_TOKEN`).
            description: Text for the job in Spark's web page, if this thread has no `setJobDescription` or job group.
            log_to_driver: Lines of the ranks that are shown: all, rank 0's, only lines passed to
                `pipelines.launch.rank.report.log_to_driver`, or none. Too many lines a second are shown in part.
            log_folder: Folder for the whole log of each rank as `rank-<n>.log`; further attempts are appended.
            start_timeout: Seconds that ranks wait for each other at the start. Gloo waits as long in one operation if
                the function does not call `pipelines.launch.rank.membership.join`.
            exchange_timeout: Seconds that Gloo waits in one operation of ranks that have called `join`; None:
                `start_timeout`.
            hang_timeout: Seconds without any `report`, `step_done` or `log_to_driver` after which a rank counts as
                hung, and the attempt ends. Imports and the first step must fit into this time. None: no limit.
            stop_grace: Seconds within which ranks must end after a request to stop; see
                `pipelines.launch.rank.report.stop_requested`.
            retries: Number of further attempts. Only infrastructure failures are retried: a dead process, executor or
                host, or a hang. Exceptions from your function are not.
            retry_wait: Seconds before the first further attempt; doubled for each later attempt, up to 300.
            allowed_sizes: Numbers of ranks that a further attempt may have when slots are lost; the largest that
                fits is taken. Empty: `num_workers` only.
            spares: Whether each task has a spare process that also calls the function. When the rank's process dies,
                the spare takes its place without another attempt. The function must use
                `pipelines.launch.rank.membership`.
            accept_unencrypted: Run although Spark must encrypt or authenticate; the error says what is unprotected.
            on_log: Called with `(rank, line)` for each line that is shown, instead of printing it.
            on_report: Called with the fields that ranks pass to `pipelines.launch.rank.report.report`, and the `rank`.
            on_attempt: Called before each attempt, when its ranks are about to start.
            on_ready: Called when all ranks of an attempt have started, before they call the function.

        Raises:
            ValueError: A value is out of range, `log_folder` is misspelt, or the session is one of Spark Connect.
        """
        check_session(spark)
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: at least one worker is needed")
        if log_to_driver not in get_args(LogToDriver):
            raise ValueError(f"log_to_driver={log_to_driver!r} is not one of {', '.join(get_args(LogToDriver))}")
        for name, value in (("retries", retries), ("stop_grace", stop_grace)):
            if value < 0:
                raise ValueError(f"{name}={value} is negative")
        self._policy = RetryPolicy(retries, retry_wait, tuple(allowed_sizes))
        self._limits = TimeLimits(start_timeout, hang_timeout, stop_grace)
        self._spark = spark
        self._num_workers, self._gpus_per_worker, self._picks_gpu = num_workers, gpus_per_worker, picks_gpu
        threads = dict.fromkeys(THREAD_VARIABLES, str(threads_per_worker)) if threads_per_worker else {}
        self._env = {_GLOO_TIMEOUT: str(int(start_timeout)), **inherited_settings(), **threads, **(env or {})}
        if spares and CYCLE_TIME in self._env:
            raise ValueError(
                f"{CYCLE_TIME}={self._env[CYCLE_TIME]}: where it is set and ranks join again, which they do with "
                "spares, Horovod 0.28 takes another size for its fusion buffer: unset it"
            )
        self._description = description
        self._spares = spares
        self._join_env = {} if exchange_timeout is None else {_GLOO_TIMEOUT: str(math.ceil(exchange_timeout))}
        self._accept_unencrypted = accept_unencrypted
        self._log_to_driver = log_to_driver
        self._log_folder = None if log_folder is None else local_path(log_folder, "log_folder")
        self._on_log = on_log or _print_line
        self._on_report = on_report or (lambda report: None)
        self._on_attempt = on_attempt or (lambda attempt: None)
        self._on_ready = on_ready or (lambda attempt: None)
        self._attempt_now: Attempt | None = None
        self._unreachable_hosts: set[str] = set()
        self._supervisor: Supervisor | None = None
        self._grows = False
        self._slots_are_back = f"slots for all {num_workers} workers are back"

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` on every rank; return rank 0's value, which may have any size.

        Other ranks do not send their values. A function that calls `sys.exit(0)` returns None.

        Raises:
            ValueError: The function or an argument cannot be pickled.
            RuntimeError: The cluster cannot place the ranks.
            WorkerError: The function raised an exception in a rank.
            InfrastructureError: A rank died, hung, was lost or did not start, in the last attempt.
            JobCancelledError: Someone has cancelled the Spark job, as by `cancelJobGroup` with this thread's group.
        """
        return self._run(function, args, kwargs, wanted=1)[0]

    def run_all(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the function as `run` does, and return the values of all ranks, in rank order."""
        return self._run(function, args, kwargs, wanted=None)

    def grow(self) -> None:
        """Begin another attempt with all ranks if the current one has fewer and slots for all are available again.

        The ranks are asked to stop, and save their state. So call this from `on_report` when a stop costs little, as at
        the end of an epoch. Such an attempt does not count as one of `retries`. Otherwise this does nothing.
        """
        attempt, supervisor = self._attempt_now, self._supervisor
        if self._spark is None or attempt is None or supervisor is None or attempt.num_workers == self._num_workers:
            return
        if not self._grows and count_slots(self._spark) >= self._num_workers:
            self._grows = True
            supervisor.request_stop(self._slots_are_back)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], wanted: int | None
    ) -> list[Any]:
        """Return the values of the first `wanted` ranks; None: of all ranks."""
        try:
            payload = cloudpickle.dumps((function, args, kwargs))
        except Exception as error:  # a __reduce__ may raise any exception
            raise ValueError(f"the function or an argument cannot be sent to the workers: {error}") from error
        _check_open_files(self._num_workers)
        with _naming_a_dead_jvm(self._spark):
            attempt = Attempt(1, self._num_workers)
            if self._spark is not None:
                check_encryption(self._spark, self._accept_unencrypted)
                check_cluster(self._spark, attempt.num_workers, self._gpus_per_worker)
                quieten_spark(self._spark)
            while True:
                self._on_attempt(attempt)
                self._attempt_now, self._grows = attempt, False
                try:
                    with delayed_sigterm() as termination:
                        return self._attempt(payload, attempt, wanted or attempt.num_workers, termination)
                except InfrastructureError as error:
                    if self._grows and isinstance(error, RankLostError) and error.root.kind == "requested":
                        attempt = Attempt(
                            attempt.number + 1, self._num_workers, self._slots_are_back, attempt.grown + 1
                        )
                    elif self._policy.retries_after(attempt, error):
                        attempt = self._next(attempt, error)
                    else:
                        raise

    def _next(self, attempt: Attempt, error: InfrastructureError) -> Attempt:
        """Wait, and return the attempt after a failed one, for the remaining slots."""
        seconds, reason = self._policy.wait_seconds(attempt), str(error).splitlines()[0]
        _log.warning("attempt %d: %s; the next one in %g s", attempt.number, reason, seconds)
        time.sleep(seconds)
        size: int | None = self._num_workers
        if self._spark is not None:
            drop_lost_executors(self._spark, self._unreachable_hosts)
            slots = count_slots(self._spark, self._num_workers)
            if self._policy.size(self._num_workers, slots) is None:
                slots = self._slots_of_new_executors(self._spark, slots)
            size = self._policy.size(self._num_workers, slots)
            if size is None:
                raise error
            if size < self._num_workers:
                _log.warning("left: %s; the run continues with %s", counted(slots, "slot"), counted(size, "worker"))
        assert size is not None
        return Attempt(attempt.number + 1, size, reason, attempt.grown)

    def _slots_of_new_executors(self, spark: SparkSession, slots: int) -> int:
        """Wait for executors that the cluster starts in place of lost ones; return the number of slots after that."""
        least, seconds = min([*self._policy.allowed_sizes, self._num_workers]), self._limits.start
        text = "%s left, and %d needed: %s"
        _log.warning(text, counted(slots, "slot"), least, f"waiting up to {seconds:g} s for new executors")
        slots = count_slots(spark, least, seconds)
        if slots < least:
            _log.warning(text, counted(slots, "slot"), least, "there is no further attempt")
        return slots

    def _attempt(self, payload: bytes, attempt: Attempt, wanted: int, termination: Termination) -> list[Any]:
        host, bind = (LOOPBACK, LOOPBACK) if self._spark is None else driver_addresses(self._spark)
        with ExitStack() as stack:
            channel = DriverChannel(host, bind)
            stack.callback(channel.close)
            rendezvous = Rendezvous(
                host,
                bind,
                attempt.num_workers,
                lambda address: address in channel.peers,
                stay_open=self._env.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("0", ""),
            )
            stack.callback(rendezvous.close)
            tasks = self._start_tasks(channel, payload, attempt)
            stack.callback(tasks.close)
            output = RankOutput(self._log_to_driver, self._on_log, self._on_report, self._log_folder)
            stack.callback(output.close)
            if attempt.number > 1:
                for rank in range(attempt.num_workers):
                    output.log(rank, [f"--- attempt {attempt.number}, after: {attempt.after}"])
            joining = JoinRounds(attempt.num_workers, lambda: rendezvous.open() | self._join_env)
            supervisor = Supervisor(channel, tasks, attempt.num_workers, output, self._limits, joining)
            stack.callback(supervisor.close)
            stack.callback(lambda: self._unreachable_hosts.update(supervisor.unreachable_hosts))
            self._supervisor = supervisor
            termination.tell(supervisor.request_stop)
            try:
                hellos = supervisor.gather()
                check_tasks(hellos, _OWN_VERSION)
                self._on_ready(attempt)
                extra = {**rendezvous.open(), ATTEMPT_VARIABLE: str(attempt.number)}
                placements = place([hello.host for hello in hellos])
                seen = devices_of_hosts(placements, [hello.devices for hello in hellos]) if self._picks_gpu else {}
                supervisor.go(
                    [
                        RunRank(p.rank, p.environment() | seen.get(p.host, {}) | extra, p.rank < wanted)
                        for p in placements
                    ]
                )
                supervisor.watch()
                return _values(channel, tasks.results(), placements, wanted)
            except BaseException:
                tasks.cancel()  # first: otherwise Spark's page shows a job whose tasks have ended as a success
                supervisor.stop()
                raise

    def _start_tasks(self, channel: DriverChannel, payload: bytes, attempt: Attempt) -> BarrierTasks | LocalTasks:
        given = TaskInput(
            channel.address,
            self._gpus_per_worker,
            self._limits.start,
            self._limits.stop_grace,
            payload,
            self._env,
            self._spares,
            os.environ.get(FORK_SERVER_VARIABLE),
        )
        if self._spark is None:
            return LocalTasks(attempt.num_workers, given)
        description = self._description + (f" (attempt {attempt.number})" if attempt.number > 1 else "")
        return BarrierTasks(self._spark, attempt.num_workers, given, description)


@contextmanager
def _naming_a_dead_jvm(spark: SparkSession | None) -> Iterator[None]:
    """Replace py4j's errors by one clear line if the JVM has ended.

    Raises:
        SparkGoneError: The JVM has ended.
    """
    try:
        yield
    except (Py4JError, ConnectionError, EOFError, AttributeError) as error:
        if spark is not None and is_jvm_gone(spark):
            raise SparkGoneError from error
        raise


def _check_open_files(num_workers: int) -> None:
    """Refuse more workers than this process can open connections and log files for.

    Raises:
        ValueError: Too few files may be open; the text says how many are needed and allowed.
    """
    # Each rank needs a connection, a log file and a request to the rendezvous, in addition to the libraries' files.
    needed, allowed = 3 * num_workers + _OWN_OPEN_FILES, allow_open_files()
    if needed > allowed:
        raise ValueError(
            f"{num_workers} workers need {needed} open files and connections of the driver, which may have {allowed}: "
            "raise its limit (ulimit -Hn)"
        )


def _values(
    channel: DriverChannel, results: Sequence[RankResult], placements: Sequence[Placement], wanted: int
) -> list[Any]:
    """Return the return values of the first `wanted` ranks."""
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
    print(f"[{rank}] {printable(line)}", flush=True)  # noqa: T201  the driver's console is where users look
