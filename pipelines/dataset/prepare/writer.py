"""Converts an archive to a dataset in one Spark job that can be stopped, continued, and used for a repair."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from conf.sections.dataset import PrepareConfig
from pipelines.archives.archive import Archive, ArchiveIndex
from pipelines.dataset.format.files import REPORT_FILE, check_apart
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.prepare.preparation import PreparationJob
from pipelines.dataset.prepare.spark_job import PrepareProgress
from pipelines.dataset.prepare.staging import clean_up, put_back, read_mark, resume_removing, staging_of
from pipelines.dataset.prepare.survey import find_finished
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.folder import Location
from pipelines.storage.inventory import is_leftover
from pipelines.storage.lock import check_place, followed, hold, tidy
from pipelines.storage.whole_files import disk_errors


def checked_index(archive: Archive, dataset: Location | Path | str) -> ArchiveIndex:
    """List the samples of an archive, and check all that can be checked of archive and dataset without Spark.

    Args:
        archive: Archive to read.
        dataset: Folder to make.

    Raises:
        FileNotFoundError: The archive is missing.
        ValueError: The archive is empty or malformed, or has no training split. Or `dataset` is something else, or
            cannot be written.
        RuntimeError: Another job writes the dataset, a storage cannot be used, or a disk is full.
    """
    dataset = followed(Location.at(dataset))
    dataset.check()
    if archive.root:
        root = Location.at(archive.root)
        root.check()
        if not root.exists():
            raise FileNotFoundError(f"archive.root={root} does not exist")
        check_apart(archive.root, dataset)
        check_apart(archive.root, staging_of(dataset))
    with disk_errors(dataset):
        if find_finished(dataset) is None:  # a finished one may lie where it can only be read
            check_place(dataset, "dataset.path")
    index = archive.index()
    found = sorted(index.samples["split"].unique().to_pylist())
    if TRAINING_SPLIT not in found:
        others = f"only of {', '.join(found)}" if found else "nor of any other"
        raise ValueError(f"the archive has no samples of the split {TRAINING_SPLIT!r}, {others}")
    return index


def prepare_dataset(
    spark: SparkSession,
    archive: Archive,
    dataset: Location | Path | str,
    *,
    row_group_mib: int = PrepareConfig.default("row_group_mib"),
    row_groups_per_shard: int = PrepareConfig.default("row_groups_per_shard"),
    seed: int = PrepareConfig.default("seed"),
    max_rejected_fraction: float = PrepareConfig.default("max_rejected_fraction"),
    overwrite: bool = PrepareConfig.default("overwrite"),
    restart: bool = PrepareConfig.default("restart"),
    verify: bool = PrepareConfig.default("verify"),
    index: ArchiveIndex | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> Manifest:
    """Write `archive` as a dataset of Petastorm-format Parquet, one directory per split.

    Shards are written under `<dataset>.incomplete`, and the folder is renamed at the end, with `dataset.json` in it.
    Whenever the job stops, `dataset` is complete or does not exist. Behind a URL, where folders cannot be renamed,
    shards are written in place and `dataset.json` comes last: without it there is no dataset.

    The same call again continues with the unfinished shards. The result equals, byte for byte, that of a job that was
    never stopped. The marker of each finished shard holds a digest of its samples. If samples were added to the
    archive, removed or changed since then, the call is refused, and the message says how many.

    The same call on a finished dataset checks it. It rewrites shards that are missing or have another size, and those
    with rejected records that can be read now. With `verify` it also rewrites those with damaged rows. The repaired
    dataset equals, byte for byte, one that never failed. On local disks it replaces the old one atomically, and
    processes that have the old files open can still read them. Behind a URL `dataset.json` is removed first and written
    again last.

    A shard stays unchanged, with a warning, if files of its samples are missing: rewriting it would lose their rows. A
    damaged shard stays too, and the call then ends with an error after everything else is finished.

    Only our own files are removed, one by one, after the archive was read. A `dataset.json` or the mark of our
    unfinished work proves which these are. A folder that holds any other file is refused.

    Args:
        spark: Session whose executors can access both paths.
        archive: Archive to read.
        dataset: Folder to make: a path, or a URL that fsspec knows. It must not contain the archive, nor be in it.
        row_group_mib: Uncompressed MiB per row group.
        row_groups_per_shard: Row groups per Parquet file.
        seed: Seed of the only shuffle of rows within their split.
        max_rejected_fraction: Largest allowed fraction of bad records; with more of them the job fails.
        overwrite: Replace an existing dataset, even one of another archive or other settings. On local disks it is
            replaced when the new one is complete. Behind a URL it is removed first, so no dataset exists until the job
            ends. Unfinished work is discarded if it is a repair or has another archive or other settings.
        restart: Discard unfinished work and start from nothing; a finished dataset is not touched.
        verify: Read the finished shards, and rewrite those with rows that differ from their checksums.
        index: What `checked_index` has returned for archive and dataset; None: it is called.
        say: Called with each message.
        progress: Called about once a second, from another thread.

    Raises:
        FileNotFoundError: The archive is missing.
        ValueError: The archive is empty or malformed, has no training split or too many bad records, or changed. Or
            `dataset` is something else, holds files that are not ours, or cannot be written.
        RuntimeError: Another job writes or has written this dataset, the storage cannot be used, a disk is full, or
            Spark gave up. Or a repair would lose good rows. The finished shards are kept.
    """
    dataset = followed(Location.at(dataset))
    job = PreparationJob(
        spark,
        archive,
        dataset,
        {"row_group_mib": row_group_mib, "row_groups_per_shard": row_groups_per_shard, "seed": seed},
        max_rejected_fraction,
        say,
        progress,
        verify,
    )
    if index is None:
        index = checked_index(archive, dataset)
    with disk_errors(dataset):
        finished = find_finished(dataset)
        if finished is not None and not overwrite and read_mark(dataset) is None:
            inventory = job.take_inventory(index, [finished])
            if job.is_whole(finished, inventory):
                untidy = any(map(is_leftover, finished.sizes)) or REPORT_FILE not in finished.sizes
                tidy(dataset, partial(job.tidy, finished, inventory), has_leftovers=untidy)
                return job.leave(finished, inventory)
        with hold(dataset) as check_owner:
            put_back(dataset)
            clean_up(dataset)
            resume_removing(staging_of(dataset))
            return job.write(index, overwrite=overwrite, restart=restart, check_owner=check_owner)
