"""One shard: planned on the driver, written by one Spark task, whole or not there."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.archives.archive import Archive, ArchiveDescription, BadRecordError, Georeference
from pipelines.archives.files import is_local
from pipelines.dataset.columns import LABEL_FIELD, label_vector, metadata_columns
from pipelines.dataset.layout import PARQUET_OPTIONS
from pipelines.dataset.manifest import Shard
from pipelines.dataset.rows import ColumnBuffer, arrow_schema, fixed_fields, plain_rows, row_checksum
from pipelines.dataset.statistics import BandSums
from pipelines.storage import Folder

PROGRESS_FOLDER = "_progress"
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
    unusable: tuple[dict[str, str], ...] = ()
    """Rows of `REJECTED_SCHEMA`: samples that are known not to be readable, and are not read."""

    @property
    def record(self) -> str:
        """Path, relative to the dataset's folder, of what is noted when the file is finished."""
        return f"{PROGRESS_FOLDER}/{self.file.replace('/', '-')}.json"


@dataclass(frozen=True)
class WrittenShard:
    """What became of the planned rows."""

    shard: Shard
    class_counts: list[int]
    band_sums: dict[str, BandSums]
    rejected: list[dict[str, str]]
    """Rows of `REJECTED_SCHEMA`."""


def write_shard(plan: ShardPlan, archive: Archive, dataset: Folder | Path | str) -> WrittenShard:
    """Read the planned samples and write them as one Parquet file that can be mapped; note it as finished.

    Bad records are left out and reported. The same plan always gives the same bytes, so attempts of the same task may
    overtake each other: each writes a file of its own, which takes the name at once.

    Args:
        plan: Rows of the file.
        archive: Where they are read from.
        dataset: Folder of the dataset, which has the split's folder.

    Raises:
        RuntimeError: A remote storage cannot be used.
    """
    folder = Folder.at(dataset)
    unusable = {row["id"] for row in plan.unusable}
    index = pa.ipc.open_stream(plan.samples).read_all()
    everything = index.select(["id", "labels", "paths"]).to_pylist()
    samples = [{**sample, "row": row} for row, sample in enumerate(everything) if sample["id"] not in unusable]
    # Not flushed to disk shard by shard: what a power cut takes is found by its size, or by its reader.
    with folder.new_file(plan.file, flush=False) as path:
        rows = _RowGroups(plan, index, archive.description, path)
        with rows, _reader(archive) as (read, window):
            while samples:
                batch, samples = samples[: rows.room(window)], samples[rows.room(window) :]
                rows.add(batch, read)
        size = path.stat().st_size
    written = rows.written(size)
    _note(written, folder, plan.record)
    return written


_Result = BadRecordError | Georeference | None
_Read = Callable[[list[dict[str, Any]], list[dict[str, NDArray[Any]]]], Iterable[_Result]]


@contextmanager
def _reader(archive: Archive) -> Iterator[tuple[_Read, int]]:
    """How samples are read, and how many at once: a remote storage answers late, but many at the same time."""

    def read_one(sample: dict[str, Any], out: dict[str, NDArray[Any]]) -> _Result:
        try:
            return archive.read(sample["paths"], out)
        except BadRecordError as error:
            return error

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
                self._rejected.append(
                    {"id": sample["id"], "file": result.file, "reason": result.reason, "detail": result.detail}
                )
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
        self._digest.update(plain_rows(table, self._fields))
        self._row_groups.append(rows)
        self._ids.clear()
        self._index_rows.clear()
        self._georeferences.clear()

    def written(self, size: int) -> WrittenShard:
        """What became of the rows, in a file of this many bytes."""
        shard = Shard(
            file=self._file, row_groups=tuple(self._row_groups), size=size, content_digest=self._digest.hexdigest()
        )
        return WrittenShard(shard, self._class_counts.tolist(), self._sums, self._rejected)


def read_finished(plan: ShardPlan, dataset: Folder) -> WrittenShard | None:
    """What an earlier attempt noted, if the file is still there as it was noted."""
    try:
        values = json.loads(dataset.read(plan.record))
        shard = Shard.model_validate_json(json.dumps(values["shard"]))
    except (FileNotFoundError, ValueError):
        return None
    if dataset.size(shard.file) != shard.size:
        return None
    sums = {
        name: BandSums(
            value["count"],
            tuple(value["total"]),
            tuple(value["squares"]),
            tuple(tuple(band) for band in value["histogram"]),
        )
        for name, value in values["band_sums"].items()
    }
    return WrittenShard(shard, values["class_counts"], sums, values["rejected"])


def count_reasons(rejected: list[dict[str, str]]) -> dict[str, int]:
    """Bad records by reason, the most frequent first."""
    return dict(Counter(row["reason"] for row in rejected).most_common())


def _note(written: WrittenShard, dataset: Folder, name: str) -> None:
    values = {
        "shard": written.shard.model_dump(mode="json"),
        "class_counts": written.class_counts,
        "band_sums": {name: asdict(sums) for name, sums in written.band_sums.items()},
        "rejected": written.rejected,
    }
    dataset.write(name, json.dumps(values).encode(), flush=False)
