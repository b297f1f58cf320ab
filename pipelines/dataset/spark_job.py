"""The Spark job that writes shards: its progress, its retries, and errors that say what happened."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath

from pyspark.sql import SparkSession

from pipelines.archives.archive import Archive
from pipelines.dataset.files import PROGRESS_FOLDER, note_name
from pipelines.dataset.manifest import Shard
from pipelines.dataset.notes import WrittenShard, read_note, read_notes
from pipelines.dataset.rows import Fields
from pipelines.dataset.shard import ShardPlan, write_shard
from pipelines.dataset.verify import ShardCheck, check_shard
from pipelines.storage import Folder
from pipelines.tasks import run_tasks, run_until_done, watched

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
    waiting = {plan.file: plan for plan in plans if plan.file not in found}

    def finished(files: list[str]) -> dict[str, WrittenShard]:
        notes = read_notes(staging, files)
        return {file: note for file, note in notes.items() if note.digest == waiting[file].digest}

    with watched(_Progress(plans, staging, found, progress).look, name="groundswell-prepare-progress"):
        written = run_until_done(
            spark,
            waiting,
            partial(_write, archive, staging),
            finished=finished,
            say=say,
            job="prepare",
            folder=staging,
            less_memory=_LESS_MEMORY,
        )
    return {**found, **written}


def check_shards(spark: SparkSession, dataset: Folder, shards: list[Shard], fields: Fields) -> list[ShardCheck]:
    """Read shards of a dataset as one Spark job, and compare every row with its checksum.

    Raises:
        RuntimeError: Spark gave up, or its JVM died; says why.
    """
    files = [shard.file for shard in shards]
    check = partial(_check, dataset, fields)
    return run_tasks(spark, shards, check, job="prepare", folder=dataset, files=files, less_memory=_LESS_MEMORY)


def _check(dataset: Folder, fields: Fields, shard: Shard) -> ShardCheck:
    # The ids of all rows are not needed, and would be the largest part of the answer.
    return replace(check_shard(dataset, shard, fields), ids=())


def _write(archive: Archive, staging: Folder, plan: ShardPlan) -> WrittenShard:
    return write_shard(plan, archive, staging)


class _Progress:
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

    def look(self) -> None:
        """Count what is finished now, and tell it."""
        for name in set(self._staging.names(PROGRESS_FOLDER)) & set(self._open):
            plan = self._open[name]
            written = read_note(plan.file, self._staging)
            if written is None or written.digest != plan.digest:  # an older note
                continue
            del self._open[name]
            self._done += plan.rows
            self._rejected += len(written.rejected)
        self._progress(PrepareProgress(self._done, self._total, self._rejected, self._found))
