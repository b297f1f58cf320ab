"""One shard: planned on the driver, and written atomically by one Spark task."""

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.archives.archive import (
    Archive,
    ArchiveDescription,
    BadRecordError,
    Georeference,
    kept_fields,
    read_into,
)
from pipelines.dataset.format.columns import LABEL_FIELD, metadata_columns, plain_values
from pipelines.dataset.format.layout import PARQUET_OPTIONS
from pipelines.dataset.format.manifest import Shard
from pipelines.dataset.format.rows import ColumnBuffer, arrow_schema, fixed_fields, row_checksum
from pipelines.dataset.format.statistics import BandSums
from pipelines.dataset.prepare.notes import WrittenShard, write_note
from pipelines.storage.folder import Location
from pipelines.storage.locations import is_url

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
    """Hex digest of the samples, the format and the layout, which decide the file's bytes except the pixels."""
    unusable: tuple[dict[str, str], ...] = ()
    """Rows of `REJECTED_SCHEMA`: samples that are known to be unreadable and are therefore not read."""
    required: frozenset[str] = frozenset()
    """Ids of the samples in a finished shard of this name; the shard is not replaced if one of them would be lost."""

    @property
    def table(self) -> pa.Table:
        """Rows of `samples`."""
        return pa.ipc.open_stream(self.samples).read_all()


def equal_parts(samples: pa.Table, count: int) -> list[pa.Table]:
    """Cut a table into parts whose sizes differ by at most one row."""
    ends = [len(samples) * (number + 1) // count for number in range(count)]
    return [samples.slice(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def stream_of(samples: pa.Table) -> bytes:
    """Serialise a slice alone; its pickle would contain the whole table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, samples.schema) as writer:
        writer.write_table(samples)
    return bytes(sink.getvalue())


def unusable_of(samples: pa.Table, unusable: dict[str, dict[str, str]]) -> tuple[dict[str, str], ...]:
    """Return the rows of `unusable`, by id, of some samples."""
    return tuple(unusable[name] for name in samples["id"].to_pylist() if name in unusable) if unusable else ()


class LostRowsError(Exception):
    """A shard is not rewritten, because some rows of the finished one can no longer be made."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        super().__init__(f"{len(rows)} samples cannot be read any more")
        self.rows = rows
        """Lost samples, as rows of `REJECTED_SCHEMA`."""


def write_shard(plan: ShardPlan, archive: Archive, dataset: Location | Path | str) -> WrittenShard:
    """Read the planned samples, write them as one Parquet file with fixed row positions, and write its marker.

    Bad records are left out and reported. The same plan always gives the same bytes, so attempts of the same task may
    overlap: each writes its own file, which gets the name atomically.

    Args:
        plan: Plan of the file.
        archive: Archive of the samples.
        dataset: Folder of the dataset; the folder of the split must exist.

    Raises:
        LostRowsError: A sample of `plan.required` can no longer be read; nothing is written.
        RuntimeError: A remote storage cannot be used.
    """
    folder = Location.at(dataset)
    unusable = {row["id"] for row in plan.unusable}
    index, description = plan.table, archive.description
    schema = arrow_schema(description.groups, len(description.class_names), kept_fields(index.schema))
    # Remote storage has a long latency.
    is_remote = is_url(archive.root)
    window = _REMOTE_READS if is_remote else 1
    samples = [
        {**sample, "row": row}
        for row, sample in enumerate(index.select(["id", "labels", "paths"]).to_pylist())
        if sample["id"] not in unusable
    ]
    # Not flushed to disk for each shard: a file that a power cut damaged is found by its size, or by its reader.
    with folder.new_file(plan.file, flush=False) as path:
        with pq.ParquetWriter(path, schema, **PARQUET_OPTIONS) as writer, ThreadPoolExecutor(window) as pool:
            rows = _RowGroups(plan, index, description, writer)
            read_one = partial(try_to_read, archive)
            read: _Read = partial(pool.map, read_one) if is_remote else partial(map, read_one)
            while samples:
                batch, samples = samples[: rows.room(window)], samples[rows.room(window) :]
                rows.add(batch, read)
            rows.flush()
        written = rows.written(path.stat().st_size)  # this finds lost rows before the file gets its name
        # The marker also comes first; the size makes it valid only once the file exists. Otherwise, after a kill in
        # between, nobody would know the content of a file that replaced another one.
        write_note(written, folder)
    return written


ReadResult = BadRecordError | Georeference | None
_Read = Callable[[list[dict[str, Any]], list[dict[str, NDArray[Any]]]], Iterable[ReadResult]]


def try_to_read(archive: Archive, sample: dict[str, Any], out: dict[str, NDArray[Any]]) -> ReadResult:
    """Read one sample into `out`; return where it lies, or its error."""
    try:
        return read_into(archive, sample["paths"], out)
    except BadRecordError as error:
        return error


def is_readable(archive: Archive, sample: dict[str, Any]) -> bool:
    """Return whether a sample can be read now."""
    out = {group.name: np.empty(group.shape, group.dtype) for group in archive.description.groups}
    return not isinstance(try_to_read(archive, sample, out), BadRecordError)


def rejection(sample_id: str, error: BadRecordError) -> dict[str, str]:
    """Return the row of `REJECTED_SCHEMA` for a sample that cannot be read."""
    return {"id": sample_id, "file": error.file, "reason": error.reason, "detail": error.detail}


class _RowGroups:
    """Rows in buffers of one row group, and the counts that are collected on the way."""

    def __init__(
        self, plan: ShardPlan, index: pa.Table, description: ArchiveDescription, writer: pq.ParquetWriter
    ) -> None:
        self._index, self._class_names, self._writer = index, description.class_names, writer
        self._plan, self._capacity = plan, min(plan.rows_per_group, plan.rows)
        self._fields = fixed_fields(description.groups, len(description.class_names))
        self._columns = {name: ColumnBuffer(*field, self._capacity) for name, field in self._fields.items()}
        self._checksums = np.zeros(self._capacity, np.uint32)
        self._digest = hashlib.sha256()
        names = [group.name for group in description.groups]
        self._images = [{name: self._columns[name].row(place) for name in names} for place in range(self._capacity)]
        self._class_counts = np.zeros(len(description.class_names), np.int64)
        self._sums: dict[str, BandSums] = {}
        self._row_groups: list[int] = []
        self._rejected = list(plan.unusable)
        self._index_rows: list[int] = []
        self._georeferences: list[Georeference | None] = []

    def room(self, most: int) -> int:
        """Return how many more samples the row group takes, at most `most`."""
        return min(most, self._capacity - len(self._index_rows))

    def add(self, samples: list[dict[str, Any]], read: _Read) -> None:
        """Read samples into the next rows; the rows after a bad one move up."""
        first = len(self._index_rows)
        places = self._images[first : first + len(samples)]
        for sample, image, result in zip(samples, places, read(samples, places), strict=True):
            if isinstance(result, BadRecordError):
                self._rejected.append(rejection(sample["id"], result))
                continue
            number = len(self._index_rows)
            row = self._images[number]
            if row is not image:
                for name, pixels in image.items():
                    row[name][...] = pixels
            labels = self._columns[LABEL_FIELD].row(number)
            labels[:] = 0
            labels[sample["labels"]] = 1
            self._class_counts += labels
            # The pixels are still in the processor's cache here.
            self._checksums[number] = row_checksum([labels.data, *(pixels.data for pixels in row.values())])
            self._index_rows.append(sample["row"])
            self._georeferences.append(result)
        if len(self._index_rows) == self._capacity:
            self.flush()

    def flush(self) -> None:
        """Write the rows in the buffers, if there are any, as a row group."""
        rows = len(self._index_rows)
        if rows == 0:
            return
        for name in self._images[0]:
            added = BandSums.of(self._columns[name].values(rows))
            self._sums[name] = self._sums[name] + added if name in self._sums else added
        columns = [column.arrow(rows) for column in self._columns.values()]
        samples = self._index.take(self._index_rows)
        metadata = metadata_columns(samples, self._class_names, self._georeferences)
        arrays = [samples["id"].combine_chunks(), *columns, pa.array(self._checksums[:rows]), *metadata]
        table = pa.table(arrays, schema=self._writer.schema)
        self._writer.write_table(table, row_group_size=rows)
        self._digest.update(plain_values(table, self._fields))
        self._row_groups.append(rows)
        self._index_rows.clear()
        self._georeferences.clear()

    def written(self, size: int) -> WrittenShard:
        """Return the result of writing, for a file with this number of bytes.

        Raises:
            LostRowsError: Some of the samples that the plan requires are bad.
        """
        lost = [row for row in self._rejected if row["id"] in self._plan.required]
        if lost:
            raise LostRowsError(lost)
        shard = Shard(
            file=self._plan.file, row_groups=tuple(self._row_groups), size=size, content_digest=self._digest.hexdigest()
        )
        return WrittenShard(shard, self._plan.digest, self._class_counts.tolist(), self._sums, self._rejected)
