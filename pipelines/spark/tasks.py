"""Independent Spark tasks, one for each item: Ctrl-C cancels them, and error messages say what happened."""

import errno
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.util import InheritableThread

from pipelines.machine.versions import check_this_executor, imported_version
from pipelines.spark.connect import Item, Value, call_each
from pipelines.spark.jobs import (
    LOST_PYTHON,
    JobCancelledError,
    collect,
    known_error,
    reason_of,
)
from pipelines.spark.session import check_running, is_connect, is_jvm_gone, is_local_mode
from pipelines.storage.folder import Location

ATTEMPTS = 4  # of an item, as Spark's spark.task.maxFailures on a cluster
_SECONDS_TO_CANCEL = 20.0
_SECONDS_BETWEEN_LOOKS = 1.0
OWN_VERSION = imported_version()
"""Code version that the driver has imported; executors must run the same code."""


class LostWorkerError(RuntimeError):
    """A Python worker of an executor died."""


def run_tasks(
    spark: SparkSession,
    items: list[Item],
    function: Callable[[Item], Value],
    *,
    job: str,
    folder: Location,
    files: list[str],
    less_memory: str,
    writes: bool = True,
) -> list[Value]:
    """Call a function for every item, each in its own task; Ctrl-C cancels the tasks.

    Args:
        spark: The session, which may be one of Spark Connect.
        items: Values that are sent to the executors; may be empty.
        function: Function that executors call once for each item.
        job: Verb of the command, for Spark's page and for messages.
        folder: Folder that the tasks write or read.
        files: Name of the file that each item writes or reads, for messages.
        less_memory: Setting that makes a task need less memory, for messages.
        writes: Whether the tasks leave finished files, from which the same command continues.

    Raises:
        LostWorkerError: A Python worker died.
        RuntimeError: Spark gave up or was stopped, or its JVM died; the message says why and how to continue.
        JobCancelledError: Someone else has cancelled the tasks.
    """
    if not items:
        return []
    check_running(spark)

    tag = f"groundswell-{job}-{uuid.uuid4().hex}"
    tags = [tag, *spark.getTags()] if is_connect(spark) else [tag]  # a thread of Spark Connect inherits none
    future: Future[list[Value]] = Future()

    def run() -> None:
        try:
            future.set_result(_call_each(spark, items, function, tags, f"groundswell {job} {folder}"))
        except BaseException as error:
            future.set_exception(error)

    # In a thread, so that Ctrl-C finds the connection to the JVM free and causes no Py4J error.
    kind = threading.Thread if is_connect(spark) else InheritableThread
    thread = kind(target=run, name=f"groundswell-{job}", daemon=True)
    thread.start()
    try:
        return future.result()
    except (Py4JError, PySparkException, OSError, EOFError) as error:
        remedy = f"finished shards are kept in {folder}, and the same command continues" if writes else "try again"
        raise _explained(error, spark, folder, files, less_memory, remedy) from None
    except KeyboardInterrupt:
        with suppress(Exception):  # the JVM may have received the signal too
            if is_connect(spark):
                spark.interruptTag(tag)
            else:
                spark.sparkContext.cancelJobsWithTag(tag)
        thread.join(_SECONDS_TO_CANCEL)
        raise


def run_until_done(
    spark: SparkSession,
    items: Mapping[str, Item],
    function: Callable[[Item], Value],
    *,
    finished: Callable[[list[str]], dict[str, Value]],
    say: Callable[[str], None],
    job: str,
    folder: Location,
    less_memory: str,
) -> dict[str, Value]:
    """Call a function for every item as `run_tasks` does, and return the values by file.

    In local mode Spark does not retry a task, and a dead Python worker ends the job of all tasks. This function then
    retries the unfinished items, as a cluster does.

    Args:
        spark: The same as in `run_tasks`.
        items: Values that are sent to the executors, by the file that each writes.
        function: The same as in `run_tasks`.
        finished: Function that finds the values of files that tasks finished before the job was lost.
        say: Called with a line about each retry.
        job: The same as in `run_tasks`.
        folder: The same as in `run_tasks`.
        less_memory: The same as in `run_tasks`.

    Raises:
        LostWorkerError: A Python worker died, on a cluster or in the last attempt.
        RuntimeError: Spark gave up, or its JVM died; the message says why and how to continue.
    """
    done: dict[str, Value] = {}
    for attempt in range(1, ATTEMPTS + 1):
        files = [file for file in items if file not in done]
        try:
            values = run_tasks(
                spark,
                [items[file] for file in files],
                function,
                job=job,
                folder=folder,
                files=files,
                less_memory=less_memory,
            )
            done |= dict(zip(files, values, strict=True))
            break
        except LostWorkerError as error:
            if attempt == ATTEMPTS or not is_local_mode(spark):
                raise
            say(f"{error}; what is not finished is tried again, attempt {attempt + 1} of {ATTEMPTS}")
            done |= finished(files)
    return done


@contextmanager
def watched(look: Callable[[], None], *, name: str) -> Iterator[None]:
    """Call `look` for the progress of tasks once a second while the block runs, and once more at its end.

    Storage errors of `look` are ignored: a longer outage stops the tasks themselves.

    Args:
        look: Function that reads and reports the progress, called in a thread.
        name: Name of the thread.
    """
    ended = threading.Event()

    def look_once() -> None:
        with suppress(RuntimeError, OSError):
            look()

    def run() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            look_once()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look_once()


def _call_each(
    spark: SparkSession, items: list[Item], function: Callable[[Item], Value], tags: list[str], description: str
) -> list[Value]:
    drivers = OWN_VERSION

    def checked(item: Item) -> Value:
        check_this_executor(drivers)  # only the driver's code may write shards
        return function(item)

    if is_connect(spark):
        for tag in tags:
            spark.addTag(tag)
        return call_each(spark, items, checked)

    return collect(spark, items, partial(map, checked), tag=tags[0], description=description)


def _explained(
    error: Exception, spark: SparkSession, folder: Location, files: list[str], less_memory: str, remedy: str
) -> RuntimeError | JobCancelledError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or "its temporary folder"
        return RuntimeError(
            f"No space left for Spark's driver in {place} (spark.local.dir, TMPDIR): make room; {remedy}"
        )
    is_broken = isinstance(error, Py4JNetworkError | OSError | EOFError)
    if is_broken or (not is_connect(spark) and is_jvm_gone(spark)):  # the JVM of Spark Connect belongs to the server
        return RuntimeError(f"Spark's JVM has died{_exit_of_jvm(spark)}; {remedy}")
    try:
        reason = reason_of(error)
    except (Py4JError, OSError):  # the JVM died just now
        return RuntimeError(f"Spark's JVM has died{_exit_of_jvm(spark)}; {remedy}")
    if (known := known_error(reason, spark)) is not None:
        return type(known)(f"{known}; {remedy}")
    if LOST_PYTHON.search(reason):
        return LostWorkerError(f"{_lost_worker(reason, files, less_memory)}; {remedy}")
    # The last line of the Python traceback says what happened: no space left, a lost executor.
    lines = [line for line in reason.split("\n\n")[0].splitlines() if line.strip()]
    if "[Errno 28]" in reason or "No space left" in reason:
        # A file for a URL is first written to the executor's disk.
        place = f"the disk of {folder}" if folder.is_local else "an executor's disk (TMPDIR)"
        return RuntimeError(f"No space left on {place}: make room; {remedy}")
    return RuntimeError(f"Spark gave up: {lines[-1].strip()}; {remedy}")


def _lost_worker(reason: str, files: list[str], less_memory: str) -> str:
    task = re.search(r"Lost task (\d+)\.\d+ in stage \S+ \(TID \d+\) \((\S+) executor (\S+?)\)", reason)
    where = f" on {task[2]} (executor {task[3]})" if task else ""
    shard = f" at the shard {files[int(task[1])]}" if task and int(task[1]) < len(files) else ""
    return (
        f"a Python worker{where} died{shard}, probably killed for lack of memory (dmesg tells): "
        f"fewer slots per host or {less_memory} need less"
    )


def _exit_of_jvm(spark: SparkSession) -> str:
    with suppress(Exception):  # the process is not ours, or has not ended
        code = spark.sparkContext._gateway.proc.wait(5)  # type: ignore[union-attr]
        return f" of signal {-code}" if code < 0 else f" with exit code {code}"
    return ""
