"""One preparation of a dataset: what exists is taken over, the rest is written, and the whole is put in place."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
from pyspark.sql import SparkSession

from pipelines.archives.archive import REJECTED_SCHEMA, Archive, ArchiveIndex, kept_fields
from pipelines.dataset.format.files import (
    INDEX_FILE,
    NOTES_FILE,
    PETASTORM_FILE,
    REJECTED_FILE,
    REPORT_FILE,
    files_of_finished,
    files_of_unfinished,
    leftovers_of_finished,
    note_name,
    notes_in,
    remove_files,
)
from pipelines.dataset.format.manifest import FILE_NAME, FORMAT_VERSION, Manifest
from pipelines.dataset.format.petastorm import write_petastorm_metadata
from pipelines.dataset.format.rows import fixed_fields
from pipelines.dataset.prepare.identity import Identity, describe, index_digest, read_index, write_index
from pipelines.dataset.prepare.notes import (
    WrittenShard,
    check_rejected,
    merge_sums,
    summarise,
    write_all_notes,
    write_earlier_note,
    write_note,
    write_rejected,
)
from pipelines.dataset.prepare.plan import Rejected, ShardInventory, plan_shards, problems
from pipelines.dataset.prepare.spark_job import PrepareProgress, check_on_storage, check_shards, write_shards
from pipelines.dataset.prepare.staging import (
    StagingMark,
    check_replaceable,
    discard,
    finish,
    link_shard,
    read_mark,
    remove_finished,
    staging_of,
    write_mark,
)
from pipelines.dataset.prepare.survey import (
    EarlierShard,
    Existing,
    Plans,
    Usable,
    all_of,
    find_finished,
    find_unfinished,
    find_usable,
    merge,
    reconcile,
    with_damage,
)
from pipelines.dataset.read.verify import ShardCheck
from pipelines.dataset.report.page import write_report
from pipelines.machine.console import counted
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.folder import Location
from pipelines.storage.locations import redacted_traceback

_LIMIT = "prepare.max_rejected_fraction"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparationJob:
    """One call of `prepare_dataset`."""

    spark: SparkSession
    archive: Archive
    dataset: Location
    settings: dict[str, int]
    max_rejected_fraction: float
    say: Callable[[str], None]
    progress: Callable[[PrepareProgress], None]
    verify: bool
    checked: dict[str, ShardCheck] = field(default_factory=dict)
    """Shards that were compared with their checksums, by path."""

    def take_inventory(self, index: ArchiveIndex, sources: list[Existing]) -> ShardInventory:
        """Plan the dataset, and find the shards of earlier runs.

        Raises:
            ValueError: Settings or samples differ from those of the earlier runs.
        """

        def plan(index: ArchiveIndex) -> Plans:
            return plan_shards(self.archive, index, **self.settings)

        described = describe(self.archive.description, self.archive.read_settings)
        identity = Identity({"format": FORMAT_VERSION, **self.settings, **described})
        earlier: list[Plans] = []
        for existing in sources:
            index, before = reconcile(existing, identity, index, plan)
            earlier.append(before)
        plans = plan(index)
        usable = Usable({}, {}, {})
        for existing, before in zip(sources, earlier, strict=True):
            found = find_usable(existing, plans, before, self.archive)
            usable = merge(usable, self.verified(existing.folder, found) if self.verify else found)
        return ShardInventory(index, identity, plans, usable).without_losses()

    def verified(self, folder: Location, usable: Usable) -> Usable:
        """Find the rows that differ from their checksums; a shard with such rows is not usable."""
        description = self.archive.description
        fields = fixed_fields(description.groups, len(description.class_names))
        shards = [found.written.shard for found in (*usable.shards.values(), *usable.to_rewrite.values())]
        new = [shard for shard in shards if f"{folder}/{shard.file}" not in self.checked]
        if new:
            self.say(f"{len(new)} shards are read and compared with their checksums")
        for check in check_shards(self.spark, folder, new, fields):
            self.checked[f"{folder}/{check.file}"] = check
            if check.damage is not None:
                self.say(f"{folder}/{check}")
        checks = [self.checked[f"{folder}/{shard.file}"] for shard in shards]
        return with_damage(usable, {check.file: check.whole_ids for check in checks if check.damage is not None})

    def is_whole(self, finished: Existing, inventory: ShardInventory) -> bool:
        """Return whether a finished dataset equals the result of this call."""
        return (
            set(inventory.written) == {plan.file for plan in all_of(inventory.plans)}
            and set(_file_names(inventory.plans)) <= set(finished.sizes)
            and self.manifest(inventory, inventory.written) == finished.manifest
        )

    def tidy(self, finished: Existing, inventory: ShardInventory) -> None:
        """Remove what killed jobs left in a whole dataset, and write a lost report again; the caller holds the lock."""
        remove_files(self.dataset, leftovers_of_finished(self.dataset))
        if REPORT_FILE not in finished.sizes:
            self.report(inventory, inventory.written, self.manifest(inventory, inventory.written))

    def leave(self, finished: Existing, inventory: ShardInventory) -> Manifest:
        """Leave a whole dataset unchanged."""
        assert finished.manifest is not None
        self.say(f"{self.dataset} is finished already; left as it is")
        inventory.check_repaired(self.dataset)
        return finished.manifest

    def write(
        self, index: ArchiveIndex, *, overwrite: bool, restart: bool, check_owner: Callable[[], None]
    ) -> Manifest:
        """Write the missing shards; the caller holds the dataset's lease."""
        finished, unfinished = find_finished(self.dataset), find_unfinished(self.dataset)
        stale = unfinished if restart else None
        if overwrite:
            stale = stale if unfinished is not None and self.can_continue(unfinished, index) else unfinished
            sources = [unfinished] if unfinished is not None and stale is None else []
        else:
            if finished is not None:
                inventory = self.take_inventory(index, [finished])
                if self.is_whole(finished, inventory):
                    self.tidy(finished, inventory)
                    return self.leave(finished, inventory)
                self.say(f"{self.dataset} is repaired: {problems(inventory.usable)}")
            sources = [
                existing for existing in (finished, unfinished) if existing is not None and existing is not stale
            ]
        check_replaceable(self.dataset)
        inventory = self.take_inventory(index, sources)
        check_rejected(
            inventory.rejected(inventory.written), inventory.total, _LIMIT, self.max_rejected_fraction, report=None
        )
        if finished is not None and finished.manifest is not None:
            files_of_finished(self.dataset, finished.manifest)
        staging = self.open(inventory, finished, unfinished, stale, overwrite)
        return self.complete(inventory, staging, check_owner)

    def can_continue(self, unfinished: Existing, index: ArchiveIndex) -> bool:
        """Return whether unfinished work has these settings and samples, and does not repair the dataset to replace."""
        mark = read_mark(unfinished.folder)
        if mark is None or not mark.is_new:
            return False
        try:
            self.take_inventory(index, [unfinished])
        except ValueError:
            return False
        return True

    def open(
        self,
        inventory: ShardInventory,
        finished: Existing | None,
        unfinished: Existing | None,
        stale: Existing | None,
        overwrite: bool,
    ) -> Location:
        """Make the folder of the unfinished dataset with all usable shards; remove files in the way.

        Raises:
            ValueError: A folder holds a file that is not ours; nothing is removed.
        """
        staging, splits = staging_of(self.dataset), list(inventory.plans)
        mark = read_mark(staging) if unfinished is not None else None
        if mark is not None:
            files_of_unfinished(staging, mark.splits)
        if stale is not None and mark is not None:
            discard(staging, mark)
            unfinished = mark = None
        if finished is not None and finished.manifest is not None and overwrite and not self.dataset.is_local:
            remove_finished(self.dataset, finished.manifest, inventory.identity, splits)
            finished = None
        earlier = mark or StagingMark(inventory.identity, [], is_new=True)
        write_mark(
            staging,
            StagingMark(
                inventory.identity,
                sorted({*splits, *earlier.splits}),
                replaced=earlier.replaced,
                is_new=overwrite or (finished is None and earlier.is_new),
            ),
        )
        for split in splits:
            staging.make(split)
        self.take_notes(inventory, staging)
        _place_shards(inventory.usable.shards, staging, unfinished.notes if unfinished is not None else {})
        if finished is not None and not self.dataset.is_local:
            staging.remove(FILE_NAME)
        before = read_index(staging) if unfinished is not None else None
        if before is None or index_digest(before) != inventory.identity.index:  # the mark alone may be of this run
            write_index(inventory.index.samples, staging)
        return staging

    def take_notes(self, inventory: ShardInventory, staging: Location) -> None:
        """Delete the markers of shards that will be rewritten.

        Otherwise a lost worker would leave a marker that says that its shard is written. The content of the shard to
        replace is still recorded, for the job that continues if this one stops.
        """
        to_rewrite = inventory.usable.to_rewrite
        earlier = {file: found for file, found in to_rewrite.items() if found.folder == staging and found.ids}
        for found in earlier.values():
            write_earlier_note(found.written, found.plan.samples, staging)
        names = {*map(note_name, inventory.written), *(note_name(file, earlier=True) for file in earlier)}
        remove_files(staging, [name for name in notes_in(staging) if name not in names])

    def complete(self, inventory: ShardInventory, staging: Location, check_owner: Callable[[], None]) -> Manifest:
        """Write the missing shards, and make a dataset of all shards."""
        plans, found = all_of(inventory.plans), inventory.written
        samples, splits = counted(sum(plan.rows for plan in plans), "sample"), counted(len(inventory.plans), "split")
        self.say(f"{samples} of {splits} in {counted(len(plans), 'shard')}")
        if found:
            self.say(f"{len(found)} shards are finished already")
        written, lost = write_shards(
            self.spark, self.archive, staging, inventory.to_write(), found, self.say, self.progress
        )
        check_owner()  # the files that follow have the same names in every job
        inventory = self.retain(inventory, staging, lost)
        written |= inventory.written
        check_on_storage(staging, written)
        rejected = inventory.rejected(written)
        write_rejected(rejected, staging)
        check_rejected(
            rejected, inventory.total, _LIMIT, self.max_rejected_fraction, report=f"{staging}/{REJECTED_FILE}"
        )
        manifest = self.manifest(inventory, written)
        kept = kept_fields(inventory.index.samples.schema)
        for split, shards in manifest.splits.items():
            write_petastorm_metadata(staging / split, shards.shards, manifest.groups, len(manifest.class_names), kept)
        write_all_notes(inventory.identity, [written[plan.file] for plan in plans], staging)
        finish(staging, self.dataset, manifest, _file_names(inventory.plans), check_owner)
        self.report(inventory, written, manifest)
        self.say(f"look at it: {self.dataset}/{REPORT_FILE}")
        for reason, count in manifest.skipped.items():
            self.say(f"left out {count} of {inventory.total} samples: {reason} (see {self.dataset}/{REJECTED_FILE})")
        inventory.check_repaired(self.dataset)
        return manifest

    def retain(self, inventory: ShardInventory, staging: Location, lost: Mapping[str, Rejected]) -> ShardInventory:
        """Restore shards that could only be rewritten with fewer samples."""
        retained = inventory.leaving(lost)
        _place_shards({file: retained.usable.shards[file] for file in lost}, staging, {})
        mark = read_mark(staging)
        assert mark is not None, staging
        if retained.identity != inventory.identity:
            write_index(retained.index.samples, staging)
            write_mark(staging, replace(mark, identity=retained.identity))
        return retained

    def manifest(self, inventory: ShardInventory, written: dict[str, WrittenShard]) -> Manifest:
        """Describe the dataset of these shards."""
        splits = {split: [written[plan.file] for plan in plans] for split, plans in inventory.plans.items()}
        source, rejected = inventory.identity.index, inventory.rejected(written)
        assert source is not None
        return summarise(self.archive.description, splits, self.settings, self.archive.read_settings, source, rejected)

    def report(self, inventory: ShardInventory, written: dict[str, WrittenShard], manifest: Manifest) -> None:
        """Write the dataset's report."""
        training = [written[plan.file] for plan in inventory.plans[TRAINING_SPLIT]]
        histograms = {name: sums.histogram for name, sums in merge_sums(training).items()}
        rejected = pa.Table.from_pylist(inventory.rejected(written), schema=REJECTED_SCHEMA)
        try:
            write_report(self.dataset, manifest, histograms, rejected)
        except Exception:  # a failed picture must not cost a night's work
            _log.error("the dataset is finished, its report is not: %s", redacted_traceback())


def _place_shards(shards: Mapping[str, EarlierShard], staging: Location, noted: Mapping[str, WrittenShard]) -> None:
    """Link finished shards into the staging folder, each with its marker; `noted` already exist there."""
    for file, found in shards.items():
        if found.folder != staging:
            link_shard(found.folder, staging, file)
        if noted.get(file) != found.written:
            write_note(found.written, staging)


def _file_names(plans: Plans) -> list[str]:
    """Return all files of a dataset but the report, which can be made again."""
    petastorm = [f"{split}/{PETASTORM_FILE}" for split in plans]
    return [FILE_NAME, REJECTED_FILE, INDEX_FILE, NOTES_FILE, *petastorm, *(plan.file for plan in all_of(plans))]
