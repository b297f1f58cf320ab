"""Samples that one Spark task scores: a shard of a dataset, or part of a raw archive, read batch by batch."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.archives.archive import Archive, BadRecordError, index_table, kept_fields
from pipelines.dataset.format.columns import ID_FIELD
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.prepare.shard import is_readable, rejection, try_to_read
from pipelines.dataset.read.buffers import BufferPool
from pipelines.dataset.read.reader import DamageError, ReaderSettings, SplitReader
from pipelines.storage.folder import Location
from pipelines.storage.locations import is_url

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


class Part(Protocol):
    """The samples of one file of predictions: a small object that is pickled and sent to the executors."""

    @property
    def file(self) -> str:
        """Name of the file of predictions."""

    @property
    def rows(self) -> int:
        """Number of samples, including unreadable ones."""

    @property
    def unusable(self) -> tuple[dict[str, str], ...]:
        """Rows of `REJECTED_SCHEMA`: samples that are known to be unreadable and are therefore not read."""

    def batches(self, batch_size: int) -> Iterator[SampleBatch]:
        """Read the samples in order, one batch ahead; every sample is in one batch, or rejected in one."""

    def can_read_any(self, ids: Collection[str]) -> bool:
        """Return whether any of these rejected samples can be read now."""

    def digest_of_sizes(self, without: Collection[str]) -> str | None:
        """Compute a digest of the sizes of all files except those of some samples; None if no size is known."""


@dataclass(frozen=True)
class DatasetPart:
    """One shard of a prepared dataset."""

    file: str
    rows: int
    split: str
    dataset: Location
    manifest: Manifest
    """Manifest with only this shard."""
    settings: ReaderSettings

    @property
    def unusable(self) -> tuple[dict[str, str], ...]:
        """See `Part.unusable`; damaged rows are found when they are read."""
        return ()

    def batches(self, batch_size: int) -> Iterator[SampleBatch]:
        """See `Part.batches`; a damaged row is rejected.

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
        """See `Part.can_read_any`."""
        reader = SplitReader(self.dataset, self.split, self.settings, manifest=self.manifest)
        for row in np.flatnonzero(pc.is_in(self.known()[ID_FIELD], pa.array(ids, pa.string())).to_numpy()):
            with suppress(DamageError):
                reader.gather(np.array([row]))
                return True
        return False

    def digest_of_sizes(self, without: Collection[str]) -> None:
        """See `Part.digest_of_sizes`; the dataset's own digest covers its shards."""

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
    """Some samples of a raw archive."""

    file: str
    rows: int
    archive: Archive
    samples: bytes
    """Rows of the archive's index, as an Arrow stream."""
    unusable: tuple[dict[str, str], ...]
    """See `Part.unusable`."""

    def batches(self, batch_size: int) -> Iterator[SampleBatch]:
        """See `Part.batches`; a sample whose files are damaged or missing is rejected.

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
        """See `Part.can_read_any`."""
        left = {*ids} - {row["id"] for row in self.unusable}
        index = pa.ipc.open_stream(self.samples).read_all()
        index = index.filter(pc.is_in(index["id"], pa.array(left, pa.string())))
        with ThreadPoolExecutor(_REMOTE_READS if is_url(self.archive.root) else _READS) as pool:
            return any(pool.map(partial(is_readable, self.archive), index.select(["id", "paths"]).to_pylist()))

    def digest_of_sizes(self, without: Collection[str]) -> str | None:
        """See `Part.digest_of_sizes`."""
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


def _one_ahead(reads: Iterable[Callable[[], _Value]]) -> Iterator[_Value]:
    """Read one batch in a thread while the one before is scored; an error is raised when its batch is due."""
    with ThreadPoolExecutor(1, thread_name_prefix="groundswell-read") as pool:
        submitted = (pool.submit(read) for read in reads)
        # A read is submitted before the one in front of it is waited for; the last one gets an empty successor.
        for batch, _ in pairwise(chain(submitted, [Future()])):
            yield batch.result()
