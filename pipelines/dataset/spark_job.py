"""The Spark job that writes shards: its progress, its retries, and errors that say what happened."""

import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession
from pyspark.util import InheritableThread

from pipelines.archives.archive import Archive
from pipelines.dataset.files import PROGRESS_FOLDER, note_name
from pipelines.dataset.manifest import Shard
from pipelines.dataset.notes import WrittenShard, read_note, read_notes
from pipelines.dataset.rows import Fields
from pipelines.dataset.shard import ShardPlan, write_shard
from pipelines.dataset.verify import ShardCheck, check_shard
from pipelines.storage import Folder

ATTEMPTS = 4  # of a shard, as Spark's spark.task.maxFailures on a cluster
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_CANCEL = 20.0
_Item = TypeVar("_Item")
_Value = TypeVar("_Value")
_WORKER_DIED = "Python worker exited unexpectedly"


@dataclass(frozen=True)
class PrepareProgress:
    """How far the job is."""

    done: int
    """Samples in finished shards, bad ones included."""
    total: int
    rejected: int
    found: int = 0
    """Those of `done` that an earlier run had finished."""


class LostWorkerError(RuntimeError):
    """A Python worker of an executor died."""


def write_shards(
    spark: SparkSession,
    archive: Archive,
    staging: Folder,
    plans: list[ShardPlan],
    found: dict[str, WrittenShard],
    say: Callable[[str], None],
    progress: Callable[[PrepareProgress], None],
) -> dict[str, WrittenShard]:
    """Write the shards that are not found, as one Spark job.

    Spark in local mode does not try a task again. So where a worker died there, the shards that are not finished are
    tried again here.

    Args:
        spark: The session.
        archive: What is read.
        staging: Folder that the shards are written to.
        plans: All shards.
        found: Those that an earlier run finished.
        say: Told of retries.
        progress: Told of finished shards.

    Returns:
        What became of every shard, by file.

    Raises:
        RuntimeError: Spark gave up, or its JVM died; says why and how to continue.
    """
    finished = dict(found)
    with _Watch(plans, staging, found, progress):
        for attempt in range(1, ATTEMPTS + 1):
            waiting = [plan for plan in plans if plan.file not in finished]
            if not waiting:
                break
            try:
                files = [plan.file for plan in waiting]
                written = _run(spark, waiting, partial(_write, archive, staging), staging, files)
                finished |= dict(zip(files, written, strict=True))
            except LostWorkerError as error:
                if attempt == ATTEMPTS or not _is_local_mode(spark):
                    raise
                say(f"{error}; what is not finished is tried again, attempt {attempt + 1} of {ATTEMPTS}")
                digests = {plan.file: plan.digest for plan in waiting}
                notes = read_notes(staging, digests)
                finished |= {file: note for file, note in notes.items() if note.digest == digests[file]}
    return finished


def check_shards(spark: SparkSession, dataset: Folder, shards: list[Shard], fields: Fields) -> list[ShardCheck]:
    """Read shards of a dataset as one Spark job, and compare every row with its checksum.

    Raises:
        RuntimeError: Spark gave up, or its JVM died; says why.
    """
    return _run(spark, shards, partial(_check, dataset, fields), dataset, [shard.file for shard in shards])


def _check(dataset: Folder, fields: Fields, shard: Shard) -> ShardCheck:
    # The ids of all rows are not needed, and would be the largest part of the answer.
    return replace(check_shard(dataset, shard, fields), ids=())


def _write(archive: Archive, staging: Folder, plan: ShardPlan) -> WrittenShard:
    return write_shard(plan, archive, staging)


def _run(
    spark: SparkSession, items: list[_Item], function: Callable[[_Item], _Value], folder: Folder, files: list[str]
) -> list[_Value]:
    """Call a function for every item, each in a task of its own."""
    if not items:
        return []

    def task(part: Iterable[_Item]) -> Iterator[_Value]:
        return map(function, part)

    group = f"groundswell-prepare-{uuid.uuid4().hex}"
    future: Future[list[_Value]] = Future()

    def collect() -> None:
        try:
            context = spark.sparkContext
            context.setJobGroup(group, f"groundswell prepare {folder}", interruptOnCancel=True)
            future.set_result(context.parallelize(items, len(items)).mapPartitions(task).collect())
        except BaseException as error:
            future.set_exception(error)

    # In a thread: Ctrl-C then finds the connection to the JVM free, and is no error of Py4J.
    thread = InheritableThread(target=collect, name="groundswell-prepare", daemon=True)
    thread.start()
    try:
        return future.result()
    except (Py4JError, OSError, EOFError) as error:
        raise _explained(error, spark, folder, files) from None
    except KeyboardInterrupt:
        with suppress(Exception):  # the JVM may have received the signal too
            spark.sparkContext.cancelJobGroup(group)
        thread.join(_SECONDS_TO_CANCEL)
        raise


def _explained(error: Exception, spark: SparkSession, folder: Folder, files: list[str]) -> RuntimeError:
    kept = f"finished shards are kept in {folder}, and the same command continues"
    if isinstance(error, Py4JNetworkError | OSError | EOFError) or not _jvm_lives(spark):
        return RuntimeError(f"Spark's JVM has died{_exit_of_jvm(spark)}; {kept}")
    java = getattr(error, "java_exception", None)
    try:
        reason = str(java.getMessage() if java is not None else error)
    except (Py4JError, OSError):  # it died in this moment
        return RuntimeError(f"Spark's JVM has died{_exit_of_jvm(spark)}; {kept}")
    if _WORKER_DIED in reason:
        return LostWorkerError(f"{_lost_worker(reason, files)}; {kept}")
    # The last line of the Python traceback in it says what happened: no space left, a lost executor.
    lines = [line for line in reason.split("\n\n")[0].splitlines() if line.strip()]
    if "[Errno 28]" in reason or "No space left" in reason:
        return RuntimeError(f"No space left on the disk of {folder}: make room; {kept}")
    return RuntimeError(f"Spark gave up: {lines[-1].strip()}; {kept}")


def _lost_worker(reason: str, files: list[str]) -> str:
    task = re.search(r"Lost task (\d+)\.\d+ in stage \S+ \(TID \d+\) \((\S+) executor (\S+?)\)", reason)
    where = f" on {task[2]} (executor {task[3]})" if task else ""
    shard = f" at the shard {files[int(task[1])]}" if task and int(task[1]) < len(files) else ""
    return (
        f"a Python worker{where} died{shard}, probably killed for lack of memory (dmesg tells): "
        "fewer slots per host or a smaller prepare.row_group_mib need less"
    )


def _is_local_mode(spark: SparkSession) -> bool:
    master = spark.sparkContext.master or ""
    return master == "local" or master.startswith("local[")


def _jvm_lives(spark: SparkSession) -> bool:
    process = getattr(spark.sparkContext._gateway, "proc", None)
    return process is None or process.poll() is None


def _exit_of_jvm(spark: SparkSession) -> str:
    process = getattr(spark.sparkContext._gateway, "proc", None)
    if process is None:
        return ""
    with suppress(Exception):
        process.wait(5)
    code = process.poll()
    if code is None:
        return ""
    return f" of signal {-code}" if code < 0 else f" with exit code {code}"


class _Watch:
    """Counts finished shards while the job runs, by the notes that they leave."""

    def __init__(
        self,
        plans: list[ShardPlan],
        staging: Folder,
        found: dict[str, WrittenShard],
        progress: Callable[[PrepareProgress], None],
    ) -> None:
        self._open = {PurePosixPath(note_name(plan.file)).name: plan for plan in plans if plan.file not in found}
        self._total = sum(plan.rows for plan in plans)
        self._staging, self._progress = staging, progress
        self._found = self._done = sum(plan.rows for plan in plans if plan.file in found)
        self._rejected = sum(len(written.rejected) for written in found.values())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="groundswell-prepare-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.wait(_SECONDS_BETWEEN_LOOKS):
            with suppress(RuntimeError, OSError):  # a storage that fails for long stops the tasks, not the display
                self._look()

    def _look(self) -> None:
        for name in set(self._staging.names(PROGRESS_FOLDER)) & set(self._open):
            plan = self._open[name]
            written = read_note(plan.file, self._staging)
            if written is None or written.digest != plan.digest:  # an older note
                continue
            del self._open[name]
            self._done += plan.rows
            self._rejected += len(written.rejected)
        self._progress(PrepareProgress(self._done, self._total, self._rejected, self._found))
