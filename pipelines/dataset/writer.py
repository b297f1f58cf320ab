"""From an archive to a dataset, as one Spark job that may be stopped and started again."""

import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from pipelines.archives.archive import REJECTED_SCHEMA, Archive, ArchiveDescription
from pipelines.dataset.index import index_digest
from pipelines.dataset.manifest import Manifest, Split
from pipelines.dataset.petastorm_metadata import write_petastorm_metadata
from pipelines.dataset.plan import plan_shards
from pipelines.dataset.report.page import FILE_NAME as REPORT_FILE
from pipelines.dataset.report.page import write_report
from pipelines.dataset.shard import (
    PROGRESS_FOLDER,
    ShardPlan,
    WrittenShard,
    count_reasons,
    read_finished,
    write_shard,
)
from pipelines.dataset.staging import finish, finished_dataset, staging_folder
from pipelines.dataset.statistics import BandSums
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage import Folder

REJECTED_FILE = "_rejected.parquet"
"""Readers that search folders for Parquet files pass over names with a leading underscore."""
_SECONDS_BETWEEN_LOOKS = 1.0
_LOOKS_AT_ONCE = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrepareProgress:
    """How far the job is."""

    done: int
    """Samples in finished shards, bad ones included."""
    total: int
    rejected: int


def prepare_dataset(
    spark: SparkSession,
    archive: Archive,
    dataset: Folder | Path | str,
    *,
    row_group_mib: int = 40,
    row_groups_per_shard: int = 4,
    seed: int = 0,
    max_rejected_fraction: float = 0.01,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> Manifest:
    """Write `archive` as a dataset of Petastorm-format Parquet, one directory per split.

    Shards are written under `<dataset>.incomplete` and the folder is renamed at the end, with `dataset.json` in it:
    whatever stops the job, `dataset` is whole or does not exist. Behind a URL, where folders cannot be renamed, they
    are written in place and `dataset.json` comes last: without it there is no dataset.

    The same call again goes on with the shards that are not finished; the result is, byte for byte, that of a job that
    was never stopped. A finished dataset of the same archive and settings is left as it is.

    Args:
        spark: Session whose executors see both paths.
        archive: What to read.
        dataset: Folder to make: a path, or a URL that fsspec knows.
        row_group_mib: Uncompressed MiB per row group.
        row_groups_per_shard: Row groups per Parquet file.
        seed: Of the one shuffle of rows within their split.
        max_rejected_fraction: More bad records than this part of all fail the job.
        overwrite: Replace what another archive or other settings made: on local disks when the new one is complete;
            behind a URL the old one is removed first, so there is none until the job ends.
        say: Told what goes on, a line at a time.
        progress: Called about once a second, from another thread.

    Raises:
        FileNotFoundError: The archive is missing.
        ValueError: It is empty or malformed, has no training split or too many bad records, or `dataset` exists and
            is something else.
        RuntimeError: Another job is writing this dataset, the storage cannot be used, or Spark gave up; the finished
            shards are kept.
    """
    dataset = Folder.at(dataset)
    dataset.check()
    if archive.root:
        Folder.at(archive.root).check()
    settings = {"row_group_mib": row_group_mib, "row_groups_per_shard": row_groups_per_shard, "seed": seed}
    index = archive.index()
    identity = {**settings, "archive": archive.description.kind, "source": index_digest(index.samples)}
    if not overwrite and (existing := finished_dataset(dataset, identity)) is not None:
        say(f"{dataset} is finished already; left as it is")
        return existing
    total = len(index.samples) + len(index.rejected)
    known = index.rejected.to_pylist() + index.unusable.to_pylist()
    _check_rejected(known, total, max_rejected_fraction, None)
    plans = plan_shards(archive.description, index, **settings)
    if TRAINING_SPLIT not in plans:
        others = f"only of {', '.join(plans)}" if plans else "nor of any other"
        raise ValueError(f"the archive has no samples of the split {TRAINING_SPLIT!r}, {others}")
    with staging_folder(dataset, identity, list(plans), overwrite) as staging:
        written = _write_shards(spark, archive, staging, plans, say, progress)
        found = [row for shards in written.values() for result in shards for row in result.rejected]
        rejected = index.rejected.to_pylist() + found
        _write_rejected(rejected, staging)
        _check_rejected(rejected, total, max_rejected_fraction, f"{staging}/{REJECTED_FILE}")
        manifest = _manifest(archive.description, written, settings, str(identity["source"]), rejected)
        for split, shards in manifest.splits.items():
            write_petastorm_metadata(staging / split, shards.shards, manifest.groups, len(manifest.class_names))
        finish(staging, dataset, manifest)
    _report(dataset, manifest, merge_sums(written[TRAINING_SPLIT]), rejected)
    say(f"look at it: {dataset}/{REPORT_FILE}")
    for reason, count in manifest.skipped.items():
        say(f"left out {count} of {total} samples: {reason} (see {dataset}/{REJECTED_FILE})")
    return manifest


def _write_shards(
    spark: SparkSession,
    archive: Archive,
    staging: Folder,
    plans: dict[str, list[ShardPlan]],
    say: Callable[[str], None],
    progress: Callable[[PrepareProgress], None],
) -> dict[str, list[WrittenShard]]:
    everything = [plan for shards in plans.values() for plan in shards]
    noted = set(staging.names(PROGRESS_FOLDER))
    finished: dict[str, WrittenShard | None] = dict.fromkeys([plan.file for plan in everything])
    candidates = [plan for plan in everything if PurePosixPath(plan.record).name in noted]
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        results = pool.map(functools.partial(read_finished, dataset=staging), candidates)
        finished |= {plan.file: result for plan, result in zip(candidates, results, strict=True)}
    waiting = [plan for plan in everything if finished[plan.file] is None]
    samples = sum(plan.rows for plan in everything)
    say(f"{samples} samples of {len(plans)} splits in {len(everything)} shards")
    if len(waiting) < len(everything):
        say(f"{len(everything) - len(waiting)} shards are finished already")
    with _Watch(everything, staging, progress):
        finished |= {written.shard.file: written for written in _run(spark, archive, staging, waiting)}
    return {
        split: [written for plan in shards if (written := finished[plan.file]) is not None]
        for split, shards in plans.items()
    }


def _run(spark: SparkSession, archive: Archive, staging: Folder, plans: list[ShardPlan]) -> list[WrittenShard]:
    if not plans:
        return []

    def task(shards: Iterable[ShardPlan]) -> Iterator[WrittenShard]:
        for shard in shards:
            yield write_shard(shard, archive, staging)

    try:
        return spark.sparkContext.parallelize(plans, len(plans)).mapPartitions(task).collect()
    except Py4JError as error:
        java = getattr(error, "java_exception", None)
        reason = str(java.getMessage() if java is not None else error)
        # The last line of the Python traceback in it says what happened: no space left, a lost executor.
        lines = [line for line in reason.split("\n\n")[0].splitlines() if line.strip()]
        raise RuntimeError(
            f"Spark gave up: {lines[-1].strip()}; finished shards are kept in {staging}, the same command goes on"
        ) from None


class _Watch:
    """Counts finished shards while the job runs, by the notes that they leave."""

    def __init__(self, plans: list[ShardPlan], staging: Folder, progress: Callable[[PrepareProgress], None]) -> None:
        self._open = {PurePosixPath(plan.record).name: plan for plan in plans}
        self._total = sum(plan.rows for plan in plans)
        self._staging, self._progress = staging, progress
        self._done = self._rejected = 0
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
        for record in set(self._staging.names(PROGRESS_FOLDER)) & set(self._open):
            plan = self._open.pop(record)
            written = read_finished(plan, self._staging)
            self._done += plan.rows
            self._rejected += len(written.rejected) if written is not None else 0
        self._progress(PrepareProgress(self._done, self._total, self._rejected))


def _report(dataset: Folder, manifest: Manifest, sums: dict[str, BandSums], rejected: list[dict[str, str]]) -> None:
    histograms = {name: part.histogram for name, part in sums.items()}
    try:
        write_report(dataset, manifest, histograms, pa.Table.from_pylist(rejected, schema=REJECTED_SCHEMA))
    except Exception:  # a night's work is not lost to a picture
        _log.exception("the dataset is finished, its report is not")


def _write_rejected(rejected: list[dict[str, str]], staging: Folder) -> None:
    with staging.new_file(REJECTED_FILE) as path:
        pq.write_table(pa.Table.from_pylist(rejected, schema=REJECTED_SCHEMA), path)


def _check_rejected(rejected: list[dict[str, str]], total: int, allowed: float, report: str | None) -> None:
    if len(rejected) <= allowed * total:
        return
    counts = ", ".join(f"{reason} {count}" for reason, count in count_reasons(rejected).items())
    raise ValueError(
        f"{len(rejected)} of {total} samples are bad ({counts}), more than prepare.max_rejected_fraction={allowed}; "
        f"the first: {rejected[0]['file']}: {rejected[0]['reason']}" + (f"; all of them: {report}" if report else "")
    )


def _manifest(
    description: ArchiveDescription,
    written: dict[str, list[WrittenShard]],
    settings: dict[str, int],
    source: str,
    rejected: list[dict[str, str]],
) -> Manifest:
    if not sum(result.shard.rows for result in written[TRAINING_SPLIT]):
        raise ValueError(f"every sample of the split {TRAINING_SPLIT!r} is bad")
    return Manifest(
        archive=description.kind,
        task=description.task,
        class_names=description.class_names,
        groups=description.groups,
        splits={split: _split(shards) for split, shards in written.items()},
        statistics={name: sums.statistics() for name, sums in merge_sums(written[TRAINING_SPLIT]).items()},
        settings=settings,
        source_fingerprint=source,
        skipped=count_reasons(rejected),
    )


def _split(shards: list[WrittenShard]) -> Split:
    return Split(
        shards=tuple(result.shard for result in shards),
        class_counts=tuple(np.sum([result.class_counts for result in shards], axis=0).tolist()),
    )


def merge_sums(shards: list[WrittenShard]) -> dict[str, BandSums]:
    """Band sums of several shards, by image group."""
    sums = [result.band_sums for result in shards if result.band_sums]
    return {name: functools.reduce(operator.add, (part[name] for part in sums)) for name in sums[0]}
