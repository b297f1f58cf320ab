"""The Spark job that writes shards: its progress, its retries, and errors that say what happened."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

from pyspark.sql import SparkSession

from pipelines.archives.archive import Archive
from pipelines.dataset.files import PROGRESS_FOLDER, note_name
from pipelines.dataset.manifest import Shard
from pipelines.dataset.notes import WrittenShard, read_note, read_notes
from pipelines.dataset.rows import Fields
from pipelines.dataset.shard import ShardPlan, write_shard
from pipelines.dataset.verify import ShardCheck, check_shard
from pipelines.storage import Folder
from pipelines.tasks import ATTEMPTS, LostWorkerError, is_local_mode, run_tasks

_SECONDS_BETWEEN_LOOKS = 1.0
_Item = TypeVar("_Item")
_Value = TypeVar("_Value")
_LESS_MEMORY = "a smaller prepare.row_group_mib"


@dataclass(frozen=True)
class PrepareProgress:
    """How far the job is."""

    done: int
    """Samples in finished shards, bad ones included."""
    total: int
    rejected: int
    found: int = 0
    """Those of `done` that an earlier run had finished."""


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
        say: Called with a line about each retry.
        progress: Called when shards are finished.

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
                if attempt == ATTEMPTS or not is_local_mode(spark):
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
    return run_tasks(spark, items, function, job="prepare", folder=folder, files=files, less_memory=_LESS_MEMORY)


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
