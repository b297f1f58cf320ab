"""The tasks of one attempt as a Spark barrier stage."""

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from pyspark import BarrierTaskContext, InheritableThread
from pyspark.sql import SparkSession

from pipelines.launch.driver.failure import InfrastructureError, SparkGoneError
from pipelines.launch.driver.preflight import decommissioned_executor
from pipelines.launch.rank.host import TaskResources
from pipelines.launch.rank.task import RankResult, TaskInput, run_task
from pipelines.spark.jobs import collect, known_error, reason_of
from pipelines.spark.session import check_running, is_jvm_gone, is_local_mode

CANCEL_SECONDS = 10.0
"""Seconds that Spark may take to end a cancelled stage."""
_FINISH_SECONDS = 1.5
RESULT_SECONDS = 120.0
"""Seconds that Spark may take to end a stage whose ranks have finished."""
_DECOMMISSION_PERIOD_SECONDS = 2.0


class BarrierTasks:
    """One barrier stage, submitted by a thread so that the caller can watch and cancel it."""

    def __init__(self, spark: SparkSession, size: int, task_input: TaskInput, description: str) -> None:
        """Submit the stage.

        Args:
            spark: A session.
            size: Number of tasks.
            task_input: Input of each task.
            description: Text for the job in Spark's web page, if the caller has set none.
        """
        self._spark, self._context = spark, spark.sparkContext
        self._tag = f"groundswell-{uuid.uuid4().hex}"
        self._results: list[RankResult] = []
        self._error: BaseException | None = None
        self._stop_reason: str | None = None
        self._cancelled = False
        self._ended = threading.Event()
        self._thread = InheritableThread(target=self._submit, args=(size, _barrier_function(task_input), description))
        self._thread.start()
        if not is_local_mode(spark):
            InheritableThread(target=self._watch_executors, daemon=True).start()

    def failure(self) -> str | None:
        """Return Spark's reason once the stage has failed.

        Raises:
            SparkGoneError: The JVM of Spark's driver has ended.
            JobCancelledError: Someone else has cancelled the stage.
            RuntimeError: The session has been stopped, or the executors' Python cannot run the driver's functions.
        """
        if self._error is None:
            return None
        if is_jvm_gone(self._spark):
            raise SparkGoneError from None
        check_running(self._spark)
        reason = reason_of(self._error)
        if (error := known_error(reason, self._spark)) is not None:
            raise error from None
        return reason

    def stop_reason(self) -> str | None:
        """Return why the ranks should save their state and stop soon; None while there is no reason."""
        return self._stop_reason

    def finished(self) -> bool:
        """Return whether all tasks have ended, with or without an error."""
        return not self._thread.is_alive()

    def results(self) -> list[RankResult]:
        """Return the tasks' results once all ranks have finished.

        Raises:
            InfrastructureError: The stage failed nevertheless, or Spark does not end it.
        """
        self._thread.join(RESULT_SECONDS)
        if self._thread.is_alive():
            raise InfrastructureError(
                f"all ranks have finished, but Spark has not ended their stage within {RESULT_SECONDS:g} s: look at "
                "the log of its driver and at the driver's memory (spark.driver.memory)"
            )
        if (reason := self.failure()) is not None:
            raise InfrastructureError(f"the barrier stage failed: {reason}") from self._error
        return self._results

    def cancel(self) -> None:
        """End the tasks now; Spark then reports none of their errors."""
        if self._thread.is_alive() and not is_jvm_gone(self._spark):
            self._cancelled = True
            with suppress(Exception):  # the context is being stopped
                self._context.cancelJobsWithTag(self._tag)

    def close(self) -> None:
        """End the stage if it has not ended."""
        self._ended.set()
        # Spark logs an error if a job is cancelled twice, and ignores a cancellation before the job starts.
        self._thread.join(CANCEL_SECONDS if self._cancelled else _FINISH_SECONDS)
        self.cancel()
        self._thread.join(CANCEL_SECONDS)

    def _submit(self, size: int, function: Callable[[Iterable[int]], Iterator[RankResult]], description: str) -> None:
        try:
            self._results = collect(
                self._spark, range(size), function, tag=self._tag, description=description, barrier=True
            )
        except BaseException as error:
            self._error = error

    def _watch_executors(self) -> None:
        while not self._ended.wait(_DECOMMISSION_PERIOD_SECONDS) and self._stop_reason is None:
            with suppress(Exception):  # the JVM has ended, which `failure` finds out
                self._stop_reason = decommissioned_executor(self._spark)


def _barrier_function(task_input: TaskInput) -> Callable[[Iterable[int]], Iterator[RankResult]]:
    def function(_: Iterable[int]) -> Iterator[RankResult]:
        context = BarrierTaskContext.get()
        task = context.partitionId()
        host = context.getTaskInfos()[task].address.rsplit(":", 1)[0]
        gpus = context.resources()["gpu"].addresses if "gpu" in context.resources() else []
        result = run_task(task_input, TaskResources(task, host, context.cpus(), gpus))
        return iter([] if result is None else [result])

    return function
