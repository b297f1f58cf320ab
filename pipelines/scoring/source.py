"""The input of scoring, a dataset or a raw archive: its identity and its parts."""

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.archives.archive import Archive, index_table, kept_fields
from pipelines.dataset.format.manifest import FILE_NAME, Split, read_manifest
from pipelines.dataset.prepare.identity import describe, index_digest
from pipelines.dataset.prepare.shard import equal_parts, stream_of, unusable_of
from pipelines.dataset.read.reader import ReaderSettings, check_readable
from pipelines.sample import ImageGroup, Task
from pipelines.scoring.parts import ArchivePart, DatasetPart, Part
from pipelines.storage.folder import Location

DATASET = "dataset"


@dataclass(frozen=True)
class Source:
    """An opened dataset or archive."""

    where: str
    """Path or URL of the input."""
    kind: str
    """Kind of the archive, or `DATASET`."""
    fingerprint: str
    """Digest of the samples: another digest means other samples. For an archive it covers names, splits and files, but
    not other metadata, which may change when a file is repaired."""
    task: Task
    class_names: tuple[str, ...]
    groups: tuple[ImageGroup, ...]
    parts: tuple[Part, ...]
    rejected: tuple[dict[str, str], ...] = ()
    """Rows of `REJECTED_SCHEMA`: entries of the archive's metadata that are no sample of any part."""
    samples_per_file: int | None = None
    """Largest number of samples of a part of a raw archive."""
    kept: Sequence[pa.Field] = ()
    """The user's own columns, which predictions copy."""

    @property
    def files(self) -> list[str]:
        """The file of predictions of each part."""
        return [part.file for part in self.parts]


def is_dataset(location: Location) -> bool:
    """Return whether a folder is a prepared dataset."""
    return location.exists(FILE_NAME)


def dataset_source(dataset: Location, settings: ReaderSettings, splits: Collection[str] | None = None) -> Source:
    """Open a prepared dataset: every shard is one part.

    Args:
        dataset: Folder of the dataset.
        settings: Settings for reading rows.
        splits: Names of the splits; None: all.

    Raises:
        FileNotFoundError: The dataset or a shard is missing.
        ValueError: A split does not exist, or the manifest or a shard is damaged.
        RuntimeError: The storage cannot be used.
    """
    manifest = read_manifest(dataset)
    chosen = sorted(manifest.splits if splits is None else splits)
    check_readable(dataset, manifest, chosen, settings)
    parts: list[DatasetPart] = []
    for split in chosen:
        content = manifest.splits[split]
        for shard in content.shards:
            alone = Split(shards=(shard,), class_counts=content.class_counts)
            one = manifest.model_copy(update={"splits": {split: alone}})
            parts.append(DatasetPart(shard.file.replace("/", "-"), shard.rows, split, dataset, one, settings))
    return Source(
        str(dataset),
        DATASET,
        manifest.fingerprint,
        manifest.task,
        manifest.class_names,
        manifest.groups,
        tuple(parts),
        kept=[*map(parts[0].known().schema.field, manifest.kept)] if manifest.kept else [],
    )


def archive_source(archive: Archive, *, samples_per_file: int) -> Source:
    """Open a raw archive: its samples, split by split in the order of its index, are cut into parts.

    Args:
        archive: The archive.
        samples_per_file: Largest number of samples of a part.

    Raises:
        FileNotFoundError: The archive or its metadata is missing.
        ValueError: The archive is empty, or its metadata cannot be read.
        RuntimeError: The storage cannot be used.
    """
    if archive.root:
        Location.at(archive.root).check()
    description, index = archive.description, archive.index()
    unusable = {row["id"]: row for row in index.unusable.to_pylist()}
    parts: list[Part] = []
    for split in sorted(pc.unique(index.samples["split"]).to_pylist()):
        samples = index.samples.filter(pc.equal(index.samples["split"], split)).combine_chunks()
        count = math.ceil(len(samples) / samples_per_file)
        for number, part in enumerate(equal_parts(samples, count)):
            name, bad = f"{split}-part-{number:05d}.parquet", unusable_of(part, unusable)
            parts.append(ArchivePart(name, len(part), archive, stream_of(part), bad))
    without_metadata = {name: index.samples[name] for name in ("id", "split", "paths")}
    digest = index_digest(index_table({**without_metadata, "labels": [[]] * len(index.samples)}))
    identity = json.dumps([digest, describe(description, archive.read_settings), samples_per_file], sort_keys=True)
    return Source(
        archive.root or description.kind,
        description.kind,
        hashlib.sha256(identity.encode()).hexdigest(),
        description.task,
        description.class_names,
        description.groups,
        tuple(parts),
        tuple(index.rejected.to_pylist()),
        samples_per_file,
        kept_fields(index.samples.schema),
    )
