"""The tasks of one attempt: a Spark barrier stage, or threads of this process for ranks on this machine."""

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from pyspark import BarrierTaskContext, InheritableThread, SparkContext
from pyspark.sql import SparkSession

from pipelines.launch.task import Launch, Site, run_task

LOOPBACK = "127.0.0.1"
_CANCEL_SECONDS = 10.0
_FINISH_SECONDS = 1.5


class SparkStage:
    """One barrier stage, run from a thread, so that the caller can watch and cancel."""

    def __init__(self, spark: SparkSession, size: int, launch: Launch) -> None:
        """Submit the stage."""
        self._context: SparkContext = spark.sparkContext
        self._group = f"groundswell-{uuid.uuid4().hex}"
        self._results: dict[int, bytes] = {}
        self._error: BaseException | None = None
        self._thread = InheritableThread(target=self._submit, args=(size, _barrier_function(launch)))
        self._thread.start()

    def failure(self) -> str | None:
        """Spark's reason, once the stage has failed."""
        return None if self._error is None else _spark_reason(self._error)

    def finished(self) -> bool:
        """Whether all tasks have ended, well or not."""
        return not self._thread.is_alive()

    def results(self) -> dict[int, bytes]:
        """What the tasks returned, by rank, when all have.

        Raises:
            RuntimeError: The stage failed after all.
        """
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"the barrier stage failed: {_spark_reason(self._error)}") from self._error
        return self._results

    def close(self) -> None:
        """End the stage if it has not ended."""
        self._thread.join(_FINISH_SECONDS)
        if self._thread.is_alive():
            with suppress(Exception):  # a context that is being stopped
                self._context.cancelJobGroup(self._group)
            self._thread.join(_CANCEL_SECONDS)

    def _submit(self, size: int, function: Callable[[Iterable[int]], Iterator[tuple[int, bytes]]]) -> None:
        try:
            self._context.setJobGroup(self._group, "groundswell workers", interruptOnCancel=True)
            ranks = self._context.parallelize(range(size), size)
            self._results = dict(ranks.barrier().mapPartitions(function).collect())
        except BaseException as error:
            self._error = error


def _barrier_function(launch: Launch) -> Callable[[Iterable[int]], Iterator[tuple[int, bytes]]]:
    def function(_: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        context = BarrierTaskContext.get()
        task = context.partitionId()
        host = context.getTaskInfos()[task].address.rsplit(":", 1)[0]
        gpus = context.resources()["gpu"].addresses if "gpu" in context.resources() else []
        result = run_task(launch, Site(task, host, context.cpus(), gpus))
        return iter([] if result is None else [result])

    return function


class LocalStage:
    """Ranks as processes of this machine, without Spark."""

    def __init__(self, size: int, launch: Launch) -> None:
        """Start a thread for each."""
        self._results: dict[int, bytes] = {}
        each = launch.gpus_per_worker
        cores = max(1, len(os.sched_getaffinity(0)) // size)
        addresses = [str(position) for position in range(len(local_gpus()))]
        sites = [Site(task, LOOPBACK, cores, addresses[task * each : task * each + each]) for task in range(size)]
        self._threads = [threading.Thread(target=self._run, args=(launch, site)) for site in sites]
        for thread in self._threads:
            thread.start()

    def failure(self) -> str | None:
        """A thread that fails has told the driver itself."""
        return None

    def finished(self) -> bool:
        """Whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def results(self) -> dict[int, bytes]:
        """What the ranks returned."""
        for thread in self._threads:
            thread.join()
        return self._results

    def close(self) -> None:
        """Wait until all are gone."""
        for thread in self._threads:
            thread.join(_CANCEL_SECONDS)

    def _run(self, launch: Launch, site: Site) -> None:
        with suppress(RuntimeError):
            result = run_task(launch, site)
            if result is not None:
                self._results.update([result])


def local_gpus() -> list[str]:
    """GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device not in ("", "-1")]
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def _spark_reason(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)
    return str(java.getMessage() if java is not None else error).split("\n\nDriver stacktrace")[0]
