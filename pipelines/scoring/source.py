"""The input of scoring, a dataset or a raw archive: its identity, and its parts, which are read batch by batch."""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.archives.archive import Archive, BadRecordError, index_table, kept_fields
from pipelines.dataset.format.columns import ID_FIELD
from pipelines.dataset.format.manifest import FILE_NAME, Manifest, Split, read_manifest
from pipelines.dataset.prepare.identity import describe, index_digest
from pipelines.dataset.prepare.shard import equal_parts, is_readable, rejection, stream_of, try_to_read, unusable_of
from pipelines.dataset.read.buffers import BufferPool
from pipelines.dataset.read.reader import DamageError, ReaderSettings, SplitReader, check_readable
from pipelines.sample import ImageGroup, Task
from pipelines.storage.folder import Location
from pipelines.storage.locations import is_url

DATASET = "dataset"
KNOWN_SCHEMA = pa.schema(
    [
        pa.field(ID_FIELD, pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("tile", pa.string()),
        pa.field("epsg", pa.int32()),
        pa.field("x0", pa.float64()),
        pa.field("y0", pa.float64()),
    ]
)
"""Columns that predictions copy from their samples: id and location, as in `columns.METADATA_SCHEMA`. The user's own
columns follow."""
_READS, _REMOTE_READS = 8, 32
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class SampleBatch:
    """Samples side by side."""

    images: dict[str, NDArray[np.generic]]
    """Images by group, `(batch size, height, width, bands)`: the known samples first, then padding."""
    known: pa.Table
    """Rows of `KNOWN_SCHEMA` and the user's own columns, one for each sample."""
    rejected: list[dict[str, str]]
    """Rows of `REJECTED_SCHEMA`: samples of this batch that cannot be read."""
    targets: NDArray[np.uint8] | None = None
    """Multi-hot, `(samples, classes)`; None if a sample was rejected, and for archives."""


@dataclass(frozen=True)
class DatasetPart:
    """One shard of a prepared dataset."""

    file: str
    """Name of the file of predictions."""
    rows: int
    """Number of samples, including unreadable ones."""
    split: str
    dataset: Location
    manifest: Manifest
    """Manifest with only this shard."""
    settings: ReaderSettings
    unusable: tuple[dict[str, str], ...] = ()
    """See `ArchivePart.unusable`; damaged rows are found when they are read."""

    def batches(self, batch_size: int) -> Iterator[SampleBatch]:
        """Read the samples in order, one batch ahead; every sample is in one batch, or rejected in one.

        Raises:
            OSError, ValueError, RuntimeError: `SplitReader` fails.
        """
        if not self.rows:
            return
        reader = SplitReader(self.dataset, self.split, self.settings, manifest=self.manifest)
        pool, known = reader.pool(batch_size), self.known()
        starts = range(0, self.rows, batch_size)
        reads = (partial(self._read, reader, pool, known, start, batch_size) for start in starts)
        yield from _one_ahead(reads)

    def can_read_any(self, ids: Collection[str]) -> bool:
        """Return whether any of these rejected samples can be read now."""
        reader = SplitReader(self.dataset, self.split, self.settings, manifest=self.manifest)
        for row in np.flatnonzero(pc.is_in(self.known()[ID_FIELD], pa.array(ids, pa.string())).to_numpy()):
            with suppress(DamageError):
                reader.gather(np.array([row]))
                return True
        return False

    def digest_of_sizes(self, without: Collection[str]) -> None:
        """See `ArchivePart.digest_of_sizes`; no size is needed, because the dataset's own digest covers its shards."""

    def _read(self, reader: SplitReader, pool: BufferPool, known: pa.Table, start: int, batch_size: int) -> SampleBatch:
        rows = np.arange(start, min(start + batch_size, self.rows))
        try:
            batch = reader.gather(rows, pool, batch_size)
            return SampleBatch(batch.images, known.slice(start, len(rows)), [], batch.targets[: len(rows)])
        except DamageError:
            return self._without_damaged(reader, known, rows, batch_size)

    def _without_damaged(
        self, reader: SplitReader, known: pa.Table, rows: NDArray[np.int64], batch_size: int
    ) -> SampleBatch:
        good: list[int] = []
        rejected: list[dict[str, str]] = []
        images: dict[str, NDArray[np.generic]] = {}
        for row in rows.tolist():
            try:
                sample = reader.gather(np.array([row])).images
            except DamageError as error:
                bad = BadRecordError(self.manifest.splits[self.split].shards[0].file, "damaged row", str(error))
                rejected.append(rejection(known[ID_FIELD][row].as_py(), bad))
                continue
            for name, pixels in sample.items():
                images.setdefault(name, np.zeros((batch_size, *pixels.shape[1:]), pixels.dtype))[len(good)] = pixels[0]
            good.append(row)
        return SampleBatch(images, known.take(pa.array(good, pa.int64())), rejected)

    def known(self) -> pa.Table:
        """Return the plain columns of the shard that predictions copy."""
        shard = self.manifest.splits[self.split].shards[0]
        with self.dataset.open(shard.file) as file, pq.ParquetFile(file) as parquet:
            found = parquet.read(columns=[*KNOWN_SCHEMA.names, *self.manifest.kept])
        schema = pa.schema([*KNOWN_SCHEMA, *map(found.schema.field, self.manifest.kept)])
        return index_table({name: found[name] for name in schema.names}, schema)


@dataclass(frozen=True)
class ArchivePart:
    """Some samples of a raw archive; for `file` and `rows` see `DatasetPart`."""

    file: str
    rows: int
    archive: Archive
    samples: bytes
    """Rows of the archive's index, as an Arrow stream."""
    unusable: tuple[dict[str, str], ...]
    """Rows of `REJECTED_SCHEMA`: samples that are known to be unreadable and are therefore not read."""

    def batches(self, batch_size: int) -> Iterator[SampleBatch]:
        """See `DatasetPart.batches`; a sample whose files are damaged or missing is rejected.

        Raises:
            RuntimeError: A remote storage cannot be used.
        """
        index = pa.ipc.open_stream(self.samples).read_all()
        if self.unusable:
            index = index.filter(pc.invert(pc.is_in(index["id"], pa.array([row["id"] for row in self.unusable]))))
            yield SampleBatch({}, KNOWN_SCHEMA.empty_table(), list(self.unusable))
        threads = _REMOTE_READS if is_url(self.archive.root) else 1
        with ThreadPoolExecutor(threads, thread_name_prefix="groundswell-archive") as pool:
            starts = range(0, len(index), batch_size)
            yield from _one_ahead(
                partial(self._read, index.slice(start, batch_size), batch_size, pool if threads > 1 else None)
                for start in starts
            )

    def can_read_any(self, ids: Collection[str]) -> bool:
        """See `DatasetPart.can_read_any`."""
        left = {*ids} - {row["id"] for row in self.unusable}
        index = pa.ipc.open_stream(self.samples).read_all()
        index = index.filter(pc.is_in(index["id"], pa.array(left, pa.string())))
        with ThreadPoolExecutor(_REMOTE_READS if is_url(self.archive.root) else _READS) as pool:
            return any(pool.map(partial(is_readable, self.archive), index.select(["id", "paths"]).to_pylist()))

    def digest_of_sizes(self, without: Collection[str]) -> str | None:
        """Compute a digest of the sizes of all files except those of some samples; None if no size is known."""
        index = pa.ipc.open_stream(self.samples).read_all()
        sizes = index["size"].filter(pc.invert(pc.is_in(index["id"], pa.array(without, pa.string()))))
        if sizes.null_count == len(sizes):
            return None
        return hashlib.sha256(sizes.fill_null(-1).to_numpy().tobytes()).hexdigest()

    def _read(self, samples: pa.Table, batch_size: int, pool: ThreadPoolExecutor | None) -> SampleBatch:
        groups = self.archive.description.groups
        images = {group.name: np.zeros((batch_size, *group.shape), group.dtype) for group in groups}
        rows: list[dict[str, Any]] = samples.select(["id", "paths"]).to_pylist()
        places = [{name: pixels[row] for name, pixels in images.items()} for row in range(len(rows))]
        results = list((pool.map if pool else map)(partial(try_to_read, self.archive), rows, places))
        good = [row for row, result in enumerate(results) if not isinstance(result, BadRecordError)]
        rejected = [
            rejection(row["id"], result)
            for row, result in zip(rows, results, strict=True)
            if isinstance(result, BadRecordError)
        ]
        if rejected:
            for pixels in images.values():
                pixels[: len(good)] = pixels[good]
        georeferences = [result for result in results if not isinstance(result, BadRecordError)]
        taken, kept = samples.take(pa.array(good, pa.int64())), kept_fields(samples.schema)
        columns = {
            **{name: taken[name] for name in ("id", "split", "tile")},
            "epsg": [place and place.epsg for place in georeferences],
            "x0": [place and place.x0 for place in georeferences],
            "y0": [place and place.y0 for place in georeferences],
            **{field.name: taken[field.name] for field in kept},
        }
        return SampleBatch(images, index_table(columns, pa.schema([*KNOWN_SCHEMA, *kept])), rejected)


Part = DatasetPart | ArchivePart
"""The samples of one file of predictions: a small object that is pickled and sent to the executors."""


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


def _one_ahead(reads: Iterable[Callable[[], _Value]]) -> Iterator[_Value]:
    """Read one batch in a thread while the one before is scored; an error is raised when its batch is due."""
    with ThreadPoolExecutor(1, thread_name_prefix="groundswell-read") as pool:
        submitted = (pool.submit(read) for read in reads)
        # A read is submitted before the one in front of it is waited for; the last one gets an empty successor.
        for batch, _ in pairwise(chain(submitted, [Future()])):
            yield batch.result()
