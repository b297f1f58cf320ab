"""The Spark job that writes shards: its progress, its retries and its error messages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath

from pyspark.sql import SparkSession

from pipelines.archives.archive import Archive
from pipelines.dataset.format.files import note_name, remove_files
from pipelines.dataset.format.manifest import Shard
from pipelines.dataset.format.rows import Fields
from pipelines.dataset.prepare.notes import WrittenShard, read_note, read_notes
from pipelines.dataset.prepare.shard import LostRowsError, ShardPlan, write_shard
from pipelines.dataset.read.verify import ShardCheck, check_shard
from pipelines.spark.tasks import run_tasks, run_until_done, watched
from pipelines.storage.folder import Location
from pipelines.storage.lease import PROGRESS_FOLDER

_LESS_MEMORY = "a smaller prepare.row_group_mib"
_Outcome = WrittenShard | list[dict[str, str]]
"""Content of a written shard; or the samples that would be lost, if the earlier shard stays."""


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of the job."""

    done: int
    """Number of samples in finished shards, bad ones included."""
    total: int
    rejected: int
    found: int = 0
    """Number of samples in `done` that an earlier run finished."""


def write_shards(
    spark: SparkSession,
    archive: Archive,
    staging: Location,
    plans: list[ShardPlan],
    found: dict[str, WrittenShard],
    say: Callable[[str], None],
    progress: Callable[[PrepareProgress], None],
) -> tuple[dict[str, WrittenShard], dict[str, list[dict[str, str]]]]:
    """Write the missing shards as one Spark job.

    Spark in local mode does not retry a task. So if a worker dies there, this function retries the shards that are not
    finished.

    Args:
        spark: The session.
        archive: Archive of the samples.
        staging: Folder for the shards.
        plans: All shards.
        found: Shards that an earlier run finished.
        say: Called with a line about each retry.
        progress: Called when shards are finished.

    Returns:
        The content of every shard that was found or written, by file. For each shard that is not rewritten because
        samples in it can no longer be read, these samples as rows of `REJECTED_SCHEMA`.

    Raises:
        RuntimeError: Spark gave up, or its JVM died; the message says why and how to continue.
    """
    waiting = {plan.file: plan for plan in plans if plan.file not in found}

    def finished(files: list[str]) -> dict[str, _Outcome]:
        notes, sizes = read_notes(staging, files), staging.files()
        return {
            file: note
            for file, note in notes.items()
            if (note.digest, note.shard.size) == (waiting[file].digest, sizes.get(file))
        }

    with watched(_ShardProgress(plans, staging, found, progress).look, name="groundswell-prepare-progress"):
        outcomes = run_until_done(
            spark,
            waiting,
            partial(_write, archive, staging),
            finished=finished,
            say=say,
            job="prepare",
            folder=staging,
            less_memory=_LESS_MEMORY,
        )
    written = {file: outcome for file, outcome in outcomes.items() if isinstance(outcome, WrittenShard)}
    lost = {file: outcome for file, outcome in outcomes.items() if isinstance(outcome, list)}
    return {**found, **written}, lost


def check_on_storage(staging: Location, written: dict[str, WrittenShard]) -> None:
    """Make sure that shards and markers are those that the tasks have reported.

    A job that lost its lease may still have a writing executor, and its shards have the same names. Also, the archive
    may change between two attempts of a task: one may then write the shard and the other its marker.

    Raises:
        RuntimeError: Some differ. Their markers are removed, so that the same command rewrites the shards.
    """
    notes, sizes = read_notes(staging, written), staging.files()
    others = [file for file, one in written.items() if (notes.get(file), sizes.get(file)) != (one, one.shard.size)]
    if others:
        remove_files(staging, [note_name(file) for file in others])
        raise RuntimeError(
            f"{staging}: another job or task has written {len(others)} shards at the same time, the first is "
            f"{others[0]}: the same command continues, and writes them again"
        )


def check_shards(spark: SparkSession, dataset: Location, shards: list[Shard], fields: Fields) -> list[ShardCheck]:
    """Read shards of a dataset in one Spark job, and compare every row with its checksum.

    Raises:
        RuntimeError: Spark gave up, or its JVM died; the message says why.
    """
    return run_tasks(
        spark,
        shards,
        partial(_check, dataset, fields),
        job="prepare",
        folder=dataset,
        files=[shard.file for shard in shards],
        less_memory=_LESS_MEMORY,
    )


def _check(dataset: Location, fields: Fields, shard: Shard) -> ShardCheck:
    check = check_shard(dataset, shard, fields)
    # The ids of a whole shard are known, and would be the largest part of the result.
    return replace(check, ids=()) if check.damage is None else check


def _write(archive: Archive, staging: Location, plan: ShardPlan) -> _Outcome:
    try:
        return write_shard(plan, archive, staging)
    except LostRowsError as error:
        return error.rows


class _ShardProgress:
    """A counter of finished shards during the job, based on their markers."""

    def __init__(
        self,
        plans: list[ShardPlan],
        staging: Location,
        found: dict[str, WrittenShard],
        progress: Callable[[PrepareProgress], None],
    ) -> None:
        self._open = {PurePosixPath(note_name(plan.file)).name: plan for plan in plans if plan.file not in found}
        self._total = sum(plan.rows for plan in plans)
        self._staging, self._progress = staging, progress
        self._found = self._done = sum(plan.rows for plan in plans if plan.file in found)
        self._rejected = sum(len(written.rejected) for written in found.values())

    def look(self) -> None:
        """Count the finished shards, and report the number."""
        for name in set(self._staging.names(PROGRESS_FOLDER)) & set(self._open):
            plan = self._open[name]
            written = read_note(plan.file, self._staging)
            if written is not None and written.digest == plan.digest:  # else an older marker
                del self._open[name]
                self._done += plan.rows
                self._rejected += len(written.rejected)
        self._progress(PrepareProgress(self._done, self._total, self._rejected, self._found))
