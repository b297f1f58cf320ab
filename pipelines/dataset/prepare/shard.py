"""One shard: planned on the driver, written by one Spark task, whole or not there."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.archives.archive import Archive, ArchiveDescription, BadRecordError, Georeference, read_into
from pipelines.archives.files import is_local
from pipelines.dataset.format.columns import LABEL_FIELD, label_vector, metadata_columns, plain_values
from pipelines.dataset.format.layout import PARQUET_OPTIONS
from pipelines.dataset.format.manifest import Shard
from pipelines.dataset.format.rows import ColumnBuffer, arrow_schema, fixed_fields, row_checksum
from pipelines.dataset.format.statistics import BandSums
from pipelines.dataset.prepare.notes import WrittenShard, write_note
from pipelines.storage.folder import Folder

_REMOTE_READS = 32


@dataclass(frozen=True)
class ShardPlan:
    """The rows of one file."""

    file: str
    """Path relative to the dataset's folder."""
    samples: bytes
    """Rows of the archive's index, as an Arrow stream."""
    rows: int
    rows_per_group: int
    digest: str
    """Hex digest of the samples, the format and the layout: of all that decides the file's bytes but the pixels."""
    unusable: tuple[dict[str, str], ...] = ()
    """Rows of `REJECTED_SCHEMA`: samples that are known not to be readable, and are not read."""
    held: frozenset[str] = frozenset()
    """Ids of the samples whose rows are in a finished shard of this name: without one of them, it is not replaced."""

    @property
    def table(self) -> pa.Table:
        """The rows of `samples`."""
        return pa.ipc.open_stream(self.samples).read_all()


class LostRowsError(Exception):
    """A shard is not written again, because rows of the finished one cannot be made any more."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        super().__init__(f"{len(rows)} samples cannot be read any more")
        self.rows = rows
        """Rows of `REJECTED_SCHEMA`: the samples."""


def write_shard(plan: ShardPlan, archive: Archive, dataset: Folder | Path | str) -> WrittenShard:
    """Read the planned samples and write them as one Parquet file whose rows have fixed places; note it as finished.

    Bad records are left out and reported. The same plan always gives the same bytes, so attempts of the same task may
    overtake each other: each writes a file of its own, which takes the name at once.

    Args:
        plan: Rows of the file.
        archive: The archive that they are read from.
        dataset: Folder of the dataset, which has the split's folder.

    Raises:
        LostRowsError: A sample of `plan.held` cannot be read any more; nothing is written.
        RuntimeError: A remote storage cannot be used.
    """
    folder = Folder.at(dataset)
    unusable = {row["id"] for row in plan.unusable}
    index = plan.table
    everything = index.select(["id", "labels", "paths"]).to_pylist()
    samples = [{**sample, "row": row} for row, sample in enumerate(everything) if sample["id"] not in unusable]
    # Not flushed to disk shard by shard: what a power cut takes is found by its size, or by its reader.
    with folder.new_file(plan.file, flush=False) as path:
        rows = _RowGroups(plan, index, archive.description, path)
        with rows, _reader(archive) as (read, window):
            while samples:
                batch, samples = samples[: rows.room(window)], samples[rows.room(window) :]
                rows.add(batch, read)
        rows.check_lost(plan.held)  # before the file gets its name
        written = rows.written(path.stat().st_size)
        # Before too; its size makes it true only once the file is there. Killed in between, nobody would know what is
        # in a file that has taken the place of another one.
        write_note(written, folder)
    return written


ReadResult = BadRecordError | Georeference | None
_Read = Callable[[list[dict[str, Any]], list[dict[str, NDArray[Any]]]], Iterable[ReadResult]]


def try_to_read(archive: Archive, sample: dict[str, Any], out: dict[str, NDArray[Any]]) -> ReadResult:
    """Read one sample into `out`; returns where it lies, or what is wrong with it."""
    try:
        return read_into(archive, sample["paths"], out)
    except BadRecordError as error:
        return error


def rejection(sample_id: str, error: BadRecordError) -> dict[str, str]:
    """Give the row of `REJECTED_SCHEMA` of a sample that cannot be read."""
    return {"id": sample_id, "file": error.file, "reason": error.reason, "detail": error.detail}


@contextmanager
def _reader(archive: Archive) -> Iterator[tuple[_Read, int]]:
    """How samples are read, and how many at once: a remote storage answers late, but many at the same time."""
    read_one = partial(try_to_read, archive)
    if is_local(archive.root):
        yield partial(map, read_one), 1
        return
    with ThreadPoolExecutor(_REMOTE_READS) as pool:
        yield partial(pool.map, read_one), _REMOTE_READS


class _RowGroups:
    """Rows as they are read, in buffers of one row group, and what is counted on the way."""

    def __init__(self, plan: ShardPlan, index: pa.Table, description: ArchiveDescription, path: Path) -> None:
        self._index, self._class_names = index, description.class_names
        class_count = len(description.class_names)
        self._plan_digest = plan.digest
        self._file, self._capacity = plan.file, min(plan.rows_per_group, plan.rows)
        self._fields = fixed_fields(description.groups, class_count)
        self._columns = {name: ColumnBuffer(*field, self._capacity) for name, field in self._fields.items()}
        self._checksums = np.zeros(self._capacity, np.uint32)
        self._digest = hashlib.sha256()
        names = [group.name for group in description.groups]
        self._images = [{name: self._columns[name].row(place) for name in names} for place in range(self._capacity)]
        self._class_counts = np.zeros(class_count, np.int64)
        self._sums: dict[str, BandSums] = {}
        self._row_groups: list[int] = []
        self._rejected = list(plan.unusable)
        self._ids: list[str] = []
        self._index_rows: list[int] = []
        self._georeferences: list[Georeference | None] = []
        self._schema = arrow_schema(description.groups, class_count)
        self._writer = pq.ParquetWriter(path, self._schema, **PARQUET_OPTIONS)

    def __enter__(self) -> None:
        """Closed at the end, also after an error."""

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self._ids and kind is None:
                self._flush()
        finally:
            self._writer.close()

    def room(self, most: int) -> int:
        """How many samples the row group takes yet, `most` at most."""
        return min(most, self._capacity - len(self._ids))

    def add(self, samples: list[dict[str, Any]], read: _Read) -> None:
        """Read samples into the next rows; those behind a bad one move up."""
        first = len(self._ids)
        places = self._images[first : first + len(samples)]
        for sample, image, result in zip(samples, places, read(samples, places), strict=True):
            if isinstance(result, BadRecordError):
                self._rejected.append(rejection(sample["id"], result))
                continue
            row = self._images[len(self._ids)]
            if row is not image:
                for name, pixels in image.items():
                    row[name][...] = pixels
            labels = label_vector(sample["labels"], len(self._class_counts))
            self._class_counts += labels
            self._columns[LABEL_FIELD].row(len(self._ids))[:] = labels
            # Here the pixels are still in the processor's cache.
            self._checksums[len(self._ids)] = row_checksum([labels.data, *(pixels.data for pixels in row.values())])
            self._ids.append(sample["id"])
            self._index_rows.append(sample["row"])
            self._georeferences.append(result)
        if len(self._ids) == self._capacity:
            self._flush()

    def _flush(self) -> None:
        rows = len(self._ids)
        for name in self._images[0]:
            added = BandSums.of(self._columns[name].values(rows))
            self._sums[name] = self._sums[name] + added if name in self._sums else added
        columns = [column.arrow(rows) for column in self._columns.values()]
        metadata = metadata_columns(self._index.take(self._index_rows), self._class_names, self._georeferences)
        arrays = [pa.array(self._ids, pa.string()), *columns, pa.array(self._checksums[:rows]), *metadata]
        table = pa.table(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=rows)
        self._digest.update(plain_values(table, self._fields))
        self._row_groups.append(rows)
        self._ids.clear()
        self._index_rows.clear()
        self._georeferences.clear()

    def check_lost(self, held: frozenset[str]) -> None:
        """Make sure that none of these samples is among the bad ones.

        Raises:
            LostRowsError: Some are.
        """
        lost = [row for row in self._rejected if row["id"] in held]
        if lost:
            raise LostRowsError(lost)

    def written(self, size: int) -> WrittenShard:
        """What became of the rows, in a file of this many bytes."""
        shard = Shard(
            file=self._file, row_groups=tuple(self._row_groups), size=size, content_digest=self._digest.hexdigest()
        )
        return WrittenShard(shard, self._plan_digest, self._class_counts.tolist(), self._sums, self._rejected)
