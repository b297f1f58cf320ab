"""From an archive to a dataset, as one Spark job that may be stopped, started again, and asked to repair its result."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from conf.dataset import PrepareConfig
from pipelines.archives.archive import REJECTED_SCHEMA, Archive, ArchiveIndex
from pipelines.dataset.disk_errors import disk_errors
from pipelines.dataset.files import (
    INDEX_FILE,
    NOTES_FILE,
    PETASTORM_FILE,
    REJECTED_FILE,
    REPORT_FILE,
    check_apart,
    files_of_finished,
    files_of_unfinished,
    note_name,
    notes_in,
    remove_files,
)
from pipelines.dataset.identity import Identity, describe
from pipelines.dataset.index import has_digest, index_digest, read_index, write_index
from pipelines.dataset.lock import hold
from pipelines.dataset.manifest import FILE_NAME, FORMAT_VERSION, Manifest, Shard
from pipelines.dataset.notes import WrittenShard, check_rejected, write_all_notes, write_note
from pipelines.dataset.petastorm_metadata import write_petastorm_metadata
from pipelines.dataset.plan import plan_shards
from pipelines.dataset.report.page import write_report
from pipelines.dataset.rows import Fields, fixed_fields
from pipelines.dataset.spark_job import PrepareProgress, check_shards, write_shards
from pipelines.dataset.staging import (
    Mark,
    check_replaceable,
    clean_up,
    discard,
    finish,
    link_shard,
    put_back,
    read_mark,
    remove_finished,
    resume_removing,
    staging_of,
    write_mark,
)
from pipelines.dataset.statistics import BandSums
from pipelines.dataset.summary import merge_sums, summarise, write_rejected
from pipelines.dataset.survey import (
    Existing,
    Plans,
    Usable,
    all_of,
    check_old,
    find_finished,
    find_unfinished,
    find_usable,
    merge,
    reconcile,
    refuse_another,
    rejected_of,
    without,
)
from pipelines.dataset.verify import ShardCheck
from pipelines.locations import redacted_traceback
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage import Folder

_log = logging.getLogger(__name__)


def prepare_dataset(
    spark: SparkSession,
    archive: Archive,
    dataset: Folder | Path | str,
    *,
    row_group_mib: int = PrepareConfig.default("row_group_mib"),
    row_groups_per_shard: int = PrepareConfig.default("row_groups_per_shard"),
    seed: int = PrepareConfig.default("seed"),
    max_rejected_fraction: float = PrepareConfig.default("max_rejected_fraction"),
    overwrite: bool = PrepareConfig.default("overwrite"),
    restart: bool = PrepareConfig.default("restart"),
    verify: bool = PrepareConfig.default("verify"),
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> Manifest:
    """Write `archive` as a dataset of Petastorm-format Parquet, one directory per split.

    Shards are written under `<dataset>.incomplete`, and the folder is renamed at the end, with `dataset.json` in it.
    Whatever stops the job, `dataset` is whole or does not exist. Behind a URL, where folders cannot be renamed, they
    are written in place and `dataset.json` comes last: without it there is no dataset.

    The same call again continues with the shards that are not finished. The result is, byte for byte, that of a job
    that was never stopped. Each finished shard is noted with a digest of its samples. Where samples were added to the
    archive, removed from it or changed since, the call is refused, and says how many.

    The same call on a finished dataset looks at it. Shards that are missing or have another size are written again,
    and so are those with rejected records that can be read now, and with `verify` those with damaged rows. The
    repaired dataset equals, byte for byte, one that never failed. On local disks it takes the old one's place at once,
    and the old files stay readable for who has them open. Behind a URL `dataset.json` is removed first and written
    again last.

    Nothing is removed but files that a `dataset.json` or the mark of our own unfinished work shows to be ours, one by
    one, after the archive was read. A folder that holds any other file is refused.

    Args:
        spark: Session whose executors see both paths.
        archive: What to read.
        dataset: Folder to make: a path, or a URL that fsspec knows. It must not contain the archive, nor be in it.
        row_group_mib: Uncompressed MiB per row group.
        row_groups_per_shard: Row groups per Parquet file.
        seed: Seed of the one shuffle of rows within their split.
        max_rejected_fraction: More bad records than this part of all fail the job.
        overwrite: Replace an existing dataset, also one that another archive or other settings made: on local disks
            when the new one is complete; behind a URL the old one is removed first, so there is none until the job
            ends. Unfinished work is discarded where it is a repair, or of another archive or other settings.
        restart: Discard unfinished work, and start from nothing; a finished dataset is not touched by this.
        verify: Read the shards that are finished already, and write again those with rows that differ from their
            checksums.
        say: Called with each line about what happens.
        progress: Called about once a second, from another thread.

    Raises:
        FileNotFoundError: The archive is missing.
        ValueError: It is empty or malformed, has no training split or too many bad records, or changed; or `dataset`
            exists and is something else, or holds files that are not ours, or cannot be written.
        RuntimeError: Another job is writing this dataset, the storage cannot be used, a disk is full, or Spark gave
            up; the finished shards are kept.
    """
    dataset = _followed(Folder.at(dataset))
    dataset.check()
    if archive.root:
        Folder.at(archive.root).check()
    check_apart(archive.root, dataset)
    check_apart(archive.root, staging_of(dataset))
    settings = {"row_group_mib": row_group_mib, "row_groups_per_shard": row_groups_per_shard, "seed": seed}
    job = _Job(spark, archive, dataset, settings, max_rejected_fraction, say, progress, verify)
    index = archive.index()
    found = sorted(index.samples["split"].unique().to_pylist())
    if TRAINING_SPLIT not in found:
        others = f"only of {', '.join(found)}" if found else "nor of any other"
        raise ValueError(f"the archive has no samples of the split {TRAINING_SPLIT!r}, {others}")
    with disk_errors(dataset):
        finished = find_finished(dataset)
        if finished is not None and not overwrite and read_mark(dataset) is None:
            stock = job.take_stock(index, [finished])
            if job.is_whole(finished, stock):
                return job.leave(finished, stock)
        with hold(dataset) as still_held:
            put_back(dataset)
            clean_up(dataset)
            resume_removing(staging_of(dataset))
            return job.write(index, overwrite=overwrite, restart=restart, still_held=still_held)


@dataclass(frozen=True)
class _Stock:
    """What is to be written, and what of it is there."""

    index: ArchiveIndex
    identity: Identity
    plans: Plans
    usable: Usable

    @property
    def written(self) -> dict[str, WrittenShard]:
        """The shards that need not be written again."""
        return {file: written for file, (written, _) in self.usable.shards.items()}

    @property
    def total(self) -> int:
        """Everything that the archive names."""
        return len(self.index.samples) + len(self.index.rejected)


@dataclass(frozen=True)
class _Job:
    """One call of `prepare_dataset`."""

    spark: SparkSession
    archive: Archive
    dataset: Folder
    settings: dict[str, int]
    max_rejected_fraction: float
    say: Callable[[str], None]
    progress: Callable[[PrepareProgress], None]
    verify: bool
    checked: dict[str, ShardCheck] = field(default_factory=dict)
    """Shards, by path, that were read and compared with their checksums."""

    def take_stock(self, index: ArchiveIndex, sources: list[Existing]) -> _Stock:
        """Plan the dataset, and find the shards that earlier runs wrote.

        Raises:
            ValueError: Settings or samples are not those of the earlier runs.
        """

        def plan(index: ArchiveIndex) -> Plans:
            return plan_shards(self.archive, index, **self.settings)

        settings = {**self.settings, **describe(self.archive.description, self.archive.read_settings)}
        identity = Identity({"format": FORMAT_VERSION, **settings})
        for existing in sources:
            if existing.is_old:
                check_old(existing, Identity(settings), index)
                continue
            refuse_another(existing, identity)
            index = reconcile(existing, index, plan)
        plans = plan(index)
        usable = Usable({}, {})
        for existing in sources:
            found = find_usable(existing, plans, self.archive)
            usable = merge(usable, self.verified(existing.folder, found) if self.verify else found)
        digests = (existing.identity.index for existing in sources)
        known = next((digest for digest in digests if has_digest(index.samples, digest)), None)
        return _Stock(index, replace(identity, index=known or index_digest(index.samples)), plans, usable)

    def verified(self, folder: Folder, usable: Usable) -> Usable:
        """Leave out the shards whose rows differ from their checksums."""
        description = self.archive.description
        fields = fixed_fields(description.groups, len(description.class_names))
        shards = [written.shard for written, _ in usable.shards.values()]
        new = [shard for shard in shards if f"{folder}/{shard.file}" not in self.checked]
        if new:
            self.say(f"{len(new)} shards are read and compared with their checksums")
            self.checked.update({f"{folder}/{check.file}": check for check in self.check(folder, new, fields)})
        damaged = [check for shard in shards if (check := self.checked[f"{folder}/{shard.file}"]).damage is not None]
        return without(usable, [check.file for check in damaged], "with damaged rows") if damaged else usable

    def check(self, folder: Folder, shards: list[Shard], fields: Fields) -> list[ShardCheck]:
        """Compare shards with their checksums."""
        checks = check_shards(self.spark, folder, shards, fields)
        for check in checks:
            if check.damage is not None:
                self.say(f"{folder}/{check}")
        return checks

    def is_whole(self, finished: Existing, stock: _Stock) -> bool:
        """Whether a finished dataset is what this call would make."""
        assert finished.manifest is not None
        if finished.is_old:
            return True
        complete = set(stock.written) == {plan.file for plan in all_of(stock.plans)}
        return (
            complete
            and set(_file_names(stock.plans)) <= set(finished.sizes)
            and self.manifest(stock, stock.written).is_like(finished.manifest)
        )

    def leave(self, finished: Existing, stock: _Stock) -> Manifest:
        """Leave a whole dataset as it is; a report that is lost is made again."""
        assert finished.manifest is not None
        if not finished.is_old and REPORT_FILE not in finished.sizes:
            self.report(stock, stock.written, finished.manifest)
        self.say(f"{self.dataset} is finished already; left as it is")
        return finished.manifest

    def write(self, index: ArchiveIndex, *, overwrite: bool, restart: bool, still_held: Callable[[], None]) -> Manifest:
        """Write what is not there, with the dataset held."""
        finished, unfinished = find_finished(self.dataset), find_unfinished(self.dataset)
        stale = unfinished if restart else None
        if overwrite:
            stale = stale if unfinished is not None and self.can_continue(unfinished, index) else unfinished
            sources = [unfinished] if unfinished is not None and stale is None else []
        else:
            if finished is not None:
                stock = self.take_stock(index, [finished])
                if self.is_whole(finished, stock):
                    return self.leave(finished, stock)
                self.say(f"{self.dataset} is repaired: {_problems(stock.usable)}")
            sources = [
                existing for existing in (finished, unfinished) if existing is not None and existing is not stale
            ]
        check_replaceable(self.dataset)
        stock = self.take_stock(index, sources)
        self.check_rejected(self.rejected(stock, stock.written), stock.total, None)
        if finished is not None and finished.manifest is not None:
            files_of_finished(self.dataset, finished.manifest)
        staging = self.open(stock, finished, unfinished, stale, overwrite)
        return self.complete(stock, staging, still_held)

    def can_continue(self, unfinished: Existing, index: ArchiveIndex) -> bool:
        """Whether unfinished work is of these settings and samples, and no repair of what is to be replaced."""
        mark = read_mark(unfinished.folder)
        if mark is None or not mark.is_new:
            return False
        try:
            self.take_stock(index, [unfinished])
        except ValueError:
            return False
        return True

    def open(
        self,
        stock: _Stock,
        finished: Existing | None,
        unfinished: Existing | None,
        stale: Existing | None,
        overwrite: bool,
    ) -> Folder:
        """Make the folder of the unfinished dataset, with all shards that are usable; removes what is in the way.

        Raises:
            ValueError: A folder holds a file that is not ours; nothing is removed.
        """
        staging, splits = staging_of(self.dataset), list(stock.plans)
        mark = read_mark(staging) if unfinished is not None else None
        if mark is not None:
            files_of_unfinished(staging, mark.splits)
        if stale is not None and mark is not None:
            discard(staging, mark)
            unfinished = mark = None
        if finished is not None and finished.manifest is not None and overwrite and not self.dataset.is_local:
            remove_finished(self.dataset, finished.manifest, stock.identity, splits)
            finished = None
        known_splits, replaced = (mark.splits, mark.replaced) if mark is not None else ([], None)
        began_new = unfinished is None or (mark is not None and mark.is_new)
        is_new = overwrite or (finished is None and began_new)
        all_splits = sorted({*splits, *known_splits})
        write_mark(staging, Mark(stock.identity, all_splits, replaced=replaced, is_new=is_new))
        for split in splits:
            staging.make(split)
        known = unfinished.notes if unfinished is not None else {}
        notes_of_written = {note_name(file) for file in stock.written}
        # By any other note a job that loses a worker would take its shard for one that it has written.
        remove_files(staging, [name for name in notes_in(staging) if name not in notes_of_written])
        for file, (written, folder) in stock.usable.shards.items():
            if folder != staging:
                link_shard(folder, staging, file)
            if known.get(file) != written:
                write_note(written, staging)
        if finished is not None and not self.dataset.is_local:
            staging.remove(FILE_NAME)
        kept = read_index(staging) if unfinished is not None else None
        if kept is None or not has_digest(kept, stock.identity.index):  # the mark alone may be of this run
            write_index(stock.index.samples, staging)
        return staging

    def complete(self, stock: _Stock, staging: Folder, still_held: Callable[[], None]) -> Manifest:
        """Write the shards that are not usable, and make a dataset of them all."""
        plans, found = all_of(stock.plans), stock.written
        self.say(f"{sum(plan.rows for plan in plans)} samples of {len(stock.plans)} splits in {len(plans)} shards")
        if found:
            self.say(f"{len(found)} shards are finished already")
        written = write_shards(self.spark, self.archive, staging, plans, found, self.say, self.progress)
        rejected = self.rejected(stock, written)
        still_held()  # the files that follow have the same names in every job
        write_rejected(rejected, staging)
        self.check_rejected(rejected, stock.total, f"{staging}/{REJECTED_FILE}")
        manifest = self.manifest(stock, written)
        for split, shards in manifest.splits.items():
            write_petastorm_metadata(staging / split, shards.shards, manifest.groups, len(manifest.class_names))
        write_all_notes(stock.identity, [written[plan.file] for plan in plans], staging)
        finish(staging, self.dataset, manifest, _file_names(stock.plans), still_held)
        self.report(stock, written, manifest)
        self.say(f"look at it: {self.dataset}/{REPORT_FILE}")
        for reason, count in manifest.skipped.items():
            self.say(f"left out {count} of {stock.total} samples: {reason} (see {self.dataset}/{REJECTED_FILE})")
        return manifest

    def rejected(self, stock: _Stock, written: dict[str, WrittenShard]) -> list[dict[str, str]]:
        """Every bad record that is known: of finished shards what was found, of others what the index says."""
        rows = list(stock.index.rejected.to_pylist())
        for plan in all_of(stock.plans):
            rows += rejected_of([written[plan.file]]) if plan.file in written else plan.unusable
        return rows

    def check_rejected(self, rejected: list[dict[str, str]], total: int, report: str | None) -> None:
        """Make sure that no more records are bad than allowed."""
        check_rejected(rejected, total, "prepare.max_rejected_fraction", self.max_rejected_fraction, report)

    def manifest(self, stock: _Stock, written: dict[str, WrittenShard]) -> Manifest:
        """Describe the dataset that these shards make."""
        splits = {split: [written[plan.file] for plan in plans] for split, plans in stock.plans.items()}
        source, rejected = stock.identity.index, self.rejected(stock, written)
        assert source is not None
        archive = self.archive
        return summarise(archive.description, splits, self.settings, archive.read_settings, source, rejected)

    def report(self, stock: _Stock, written: dict[str, WrittenShard], manifest: Manifest) -> None:
        """Make the page about the dataset."""
        sums = merge_sums([written[plan.file] for plan in stock.plans[TRAINING_SPLIT]])
        _report(self.dataset, manifest, sums, self.rejected(stock, written))


def _followed(dataset: Folder) -> Folder:
    """The folder that a symbolic link leads to: its neighbours are on the same disk."""
    return Folder(str(dataset.path.resolve())) if dataset.is_local and dataset.path.is_symlink() else dataset


def _file_names(plans: Plans) -> list[str]:
    """Everything that makes a dataset; the report, which is about it, can be made again."""
    petastorm = [f"{split}/{PETASTORM_FILE}" for split in plans]
    return [FILE_NAME, REJECTED_FILE, INDEX_FILE, NOTES_FILE, *petastorm, *(plan.file for plan in all_of(plans))]


def _problems(usable: Usable) -> str:
    counts = [f"{count} shards {reason}" for reason, count in usable.problems.items()]
    return ", ".join(counts) or "what describes the shards is lost or out of date"


def _report(dataset: Folder, manifest: Manifest, sums: dict[str, BandSums], rejected: list[dict[str, str]]) -> None:
    histograms = {name: part.histogram for name, part in sums.items()}
    try:
        write_report(dataset, manifest, histograms, pa.Table.from_pylist(rejected, schema=REJECTED_SCHEMA))
    except Exception:  # a night's work is not lost to a picture
        _log.error("the dataset is finished, its report is not: %s", redacted_traceback())
