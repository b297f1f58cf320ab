"""Spark jobs beside the caller's own: what they inherit, which Python runs them, and what Spark says of their end."""

import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import cloudpickle
from pyspark.sql import SparkSession

from pipelines.machine.versions import imported_version
from pipelines.spark.session import is_connect, is_local_mode

_CANCELLED = re.compile(
    r"^(?:\[SPARK_JOB_CANCELLED\] )?Job \d+ cancelled ?(?!because SparkContext was shut down)(.*?)(?: SQLSTATE:.*)?$"
    r"|\[OPERATION_CANCELED\] ([^.\n]*)",  # Spark Connect
    re.MULTILINE,
)

LOST_PYTHON = re.compile(
    "Python worker exited unexpectedly"
    "|Python worker process terminated"  # Spark 4.1
    "|Python worker failed to connect back|Timed out while waiting for the Python worker to connect back"
    "|Python (?:daemon )?failed to launch worker"
    "|EOFException occurred while reading the port number"
    # The connection to a worker or to the daemon broke.
    r"|java\.(?:io\.(?:EOFException|IOException: Broken pipe)|net\.SocketException).*"
    r"(?:\n\tat .*)*?\n\tat org\.apache\.spark\.api\.python\."
)
"""Spark's texts about a lost Python process, in the versions 3.5 to 4.1; `known_error` finds the others first."""
_OTHER_PYTHON = (
    "the executors' Python is {executors}, which cannot run what the driver's, {drivers}, sends ({problem}): set "
    "PYSPARK_PYTHON to the driver's Python, or to one of the executors with the same packages"
)
_UNUSABLE_PYTHON = re.compile(
    r"RuntimeError: (?P<line>the executors' Python is .*)"
    r"|\[PYTHON_VERSION_MISMATCH\] (?P<versions>Python in worker .*?)(?:, PySpark.*)?$"
    r"|java\.io\.IOException: (?P<none>Cannot run program .*)"
    # The standard error of a daemon that did not start; one that was killed writes nothing there.
    r"|Error from python worker:\n(?:.*\n)*?\s*(?P<stderr>.*)\nPYTHONPATH was"
    # Spark could not read the function of a DataFrame.
    r"|, in read_udfs\n(?:[ \t].*\n)+(?P<reading>\w+Error: .*)",
    re.MULTILINE,
)


class JobCancelledError(KeyboardInterrupt):
    """The interruption of a Spark job from outside: by the caller's job group or tag, or on Spark's page."""


def reason_of(error: BaseException) -> str:
    """Return Spark's message about a failed job, without the stack of its driver.

    Raises:
        Py4JError, OSError: The JVM has just died.
    """
    java = getattr(error, "java_exception", None)
    return str(java.getMessage() if java is not None else error).split("\n\nDriver stacktrace")[0]


def known_error(reason: str, spark: SparkSession) -> JobCancelledError | RuntimeError | None:
    """Return an error with one line if the caller has cancelled a job, or Python cannot run it; None: neither.

    Args:
        reason: Spark's message about a failed job.
        spark: The session of the job.
    """
    if (found := _CANCELLED.search(reason)) is not None:
        who = found[1] or found[2] or "without a reason"
        return JobCancelledError(f"the Spark job was cancelled from outside ({who})")
    if (found := _UNUSABLE_PYTHON.search(reason)) is None:
        return None
    problem = found["versions"] or found["none"] or found["stderr"] or found["reading"]
    executors = "the server's" if is_connect(spark) else spark.sparkContext.pythonExec
    line = _OTHER_PYTHON.format(executors=executors, drivers=_this_python(), problem=problem)
    return RuntimeError(found["line"] or line)


@contextmanager
def on_drivers_python(spark: SparkSession) -> Iterator[None]:
    """Let a local session run the functions that are sent in this block on the driver's Python.

    Otherwise Spark takes `python3` from PATH, where PYSPARK_PYTHON is not set. An RDD's function is sent by `RDD.id()`.
    """
    with ExitStack() as stack:
        if is_local_mode(spark):
            context = spark.sparkContext
            stack.callback(setattr, context, "pythonExec", context.pythonExec)
            context.pythonExec = sys.executable
        yield


def for_executors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for Spark's tasks that reads `function` only where Python has the driver's packages.

    Where it has not, `known_error` finds the reason in Spark's message. Nothing of this project can be used
    before that is known, so the function itself names only the standard library.
    """
    proof, pickled, drivers = cloudpickle.dumps(lambda: imported_version), cloudpickle.dumps(function), _this_python()

    def call(*args: Any) -> Any:
        import pickle

        try:
            pickle.loads(proof)
        except Exception as error:  # a package is missing, or has another version
            text = _OTHER_PYTHON.format(
                executors=f"{sys.executable} (Python {platform.python_version()})",
                drivers=drivers,
                problem=f"{type(error).__name__}: {error}",
            )
            raise RuntimeError(text) from None
        return pickle.loads(pickled)(*args)

    return call


def collect(
    spark: SparkSession,
    items: Sequence[Any],
    function: Callable[..., Any],
    *,
    tag: str,
    description: str,
    barrier: bool = False,
) -> list[Any]:
    """Run a job that calls a function with each item in its own task; the caller's group, pool and tags stay.

    Args:
        spark: Classic session. The thread must be an `InheritableThread`, which has the caller's properties.
        items: Items of the tasks.
        function: Called with an iterator over the item of the task; returns an iterator over values.
        tag: The tag for `cancelJobsWithTag`.
        description: Text for the job in Spark's web page, if the caller has set none.
        barrier: Whether the tasks start together.
    """
    context = spark.sparkContext
    context.addJobTag(tag)
    context.setInterruptOnCancel(True)
    context.setJobDescription(context.getLocalProperty("spark.job.description") or description)
    sent = for_executors(function)
    with on_drivers_python(spark):
        partitions = context.parallelize(items, len(items))
        calls = partitions.barrier().mapPartitions(sent) if barrier else partitions.mapPartitions(sent)
        calls.id()
    return calls.collect()


def _this_python() -> str:
    return f"{sys.executable} (Python {platform.python_version()})"
