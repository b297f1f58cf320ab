"""One Horovod worker per task of a Spark barrier stage."""

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cloudpickle
from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from pipelines.launch.channel import DriverChannel, Message
from pipelines.launch.preflight import check_cluster, driver_addresses
from pipelines.launch.task import THREAD_VARIABLES, Launch, is_consequence, run_task

_LOOK_SECONDS = 0.2
_CANCEL_SECONDS = 15.0


class WorkerError(RuntimeError):
    """A rank failed: names the rank that failed first, its host and its traceback."""


class BarrierRunner:
    """Runs a function on every rank of a Horovod job inside one Spark barrier stage."""

    def __init__(
        self,
        spark: SparkSession,
        num_workers: int,
        *,
        gpus_per_worker: int = 0,
        threads_per_worker: int | None = None,
        start_timeout_seconds: int = 300,
        environment: dict[str, str] | None = None,
        on_log: Callable[[int, str], None] | None = None,
        on_report: Callable[[Message], None] | None = None,
    ) -> None:
        """Describe the job; nothing starts yet.

        Args:
            spark: Session whose executors have this package installed.
            num_workers: Ranks, one per Spark task.
            gpus_per_worker: GPUs that each rank sees, out of those that Spark gives its task.
            threads_per_worker: TensorFlow's threads in each rank; None: the cores of its Spark task.
            start_timeout_seconds: How long ranks wait for each other: to start, and for Gloo in one operation.
            environment: Further variables of the worker processes.
            on_log: Called on the driver with `(rank, line)` for each line that a worker prints.
            on_report: Called on the driver with what workers pass to `pipelines.launch.report.report`.
        """
        self._spark = spark
        self._num_workers = num_workers
        self._gpus_per_worker = gpus_per_worker
        self._start_timeout_seconds = start_timeout_seconds
        threads = dict.fromkeys(THREAD_VARIABLES, str(threads_per_worker)) if threads_per_worker else {}
        self._environment = {**threads, **(environment or {})}
        self._on_log = on_log or _print_line
        self._on_report = on_report or (lambda message: None)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` on every rank; rank 0's value.

        Raises:
            ValueError: The function or an argument cannot be pickled.
            RuntimeError: The cluster cannot place the ranks.
            WorkerError: A rank failed.
        """
        return self.run_all(function, *args, **kwargs)[0]

    def run_all(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `run`; every rank's value, in rank order."""
        check_cluster(self._spark, self._num_workers, self._gpus_per_worker)
        try:
            payload = cloudpickle.dumps((function, args, kwargs))
        except Exception as error:  # whatever a __reduce__ raises
            raise ValueError(f"the function or an argument cannot be sent to the workers: {error}") from error
        failures: list[Message] = []

        def on_message(message: Message) -> None:
            if message["kind"] == "log":
                self._on_log(message["rank"], message["line"])
            elif message["kind"] == "failure":
                failures.append(message)
            else:
                self._on_report(message)

        host, bind = driver_addresses(self._spark)
        channel = DriverChannel(host, on_message, bind)
        launch = Launch(payload, channel.address, self._gpus_per_worker, self._start_timeout_seconds, self._environment)

        def task(_: Iterable[int]) -> Iterator[tuple[int, bytes]]:
            return run_task(launch)

        stopped: Py4JError | None = None
        try:
            results = dict(self._collect(task))
        except Py4JError as error:
            stopped = error
        finally:
            channel.close()  # waits for what the ranks have said: the failure that explains the others
        if stopped is not None and failures:
            raise WorkerError(describe(failures))
        if stopped is not None:
            raise WorkerError(f"the barrier stage failed: {_spark_reason(stopped)}")
        return [cloudpickle.loads(results[rank]) for rank in range(self._num_workers)]

    def _collect(self, task: Callable[[Iterable[int]], Iterator[tuple[int, bytes]]]) -> list[tuple[int, bytes]]:
        """Run the barrier stage on another thread, so that an interrupt of this one can cancel it."""
        context = self._spark.sparkContext
        group = f"groundswell-{uuid.uuid4().hex}"
        results: list[tuple[int, bytes]] = []
        errors: list[BaseException] = []

        def job() -> None:
            context.setJobGroup(group, "groundswell workers", interruptOnCancel=True)
            try:
                ranks = context.parallelize(range(self._num_workers), self._num_workers)
                results.extend(ranks.barrier().mapPartitions(task).collect())
            except BaseException as error:  # raised again below
                errors.append(error)

        thread = InheritableThread(target=job)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)
        except BaseException:
            context.cancelJobGroup(group)
            thread.join(_CANCEL_SECONDS)
            raise
        if errors:
            raise errors[0]
        return results


def describe(failures: list[Message]) -> str:
    """One text for several failed ranks: the root cause with its traceback, the others as its consequences."""
    root = next((failure for failure in failures if not is_consequence(failure)), failures[0])
    headline = f"rank {root['rank']} on {root['host']} failed: {root['error']}"
    if root["message"]:
        headline += f": {root['message']}"
    evidence = root["traceback"].rstrip() or "\n".join(root["last_lines"])
    others = sorted({failure["rank"] for failure in failures} - {root["rank"]})
    if others:
        headline += f" (ranks {', '.join(map(str, others))} stopped in consequence)"
    return f"{headline}\n{evidence}" if evidence else headline


def _print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)  # noqa: T201  the driver's console is where users look


def _spark_reason(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    return str(java.getMessage() if java is not None else error).split("\n\nDriver stacktrace")[0]
