"""One shard: planned on the driver, written by one Spark task, whole or not there."""

import json
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.archives.archive import Archive, BadRecordError
from pipelines.dataset.manifest import Shard
from pipelines.dataset.rows import ColumnBuffer, arrow_schema, fixed_fields
from pipelines.dataset.schema import LABEL_FIELD, label_vector
from pipelines.dataset.statistics import BandSums

PROGRESS_FOLDER = "_progress"


@dataclass(frozen=True)
class ShardPlan:
    """The rows of one file."""

    file: str
    """Path relative to the dataset's folder."""
    samples: bytes
    """Rows of the archive's index, as an Arrow stream."""
    rows: int
    rows_per_group: int

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


def write_shard(plan: ShardPlan, archive: Archive, dataset: Path) -> WrittenShard:
    """Read the planned samples and write them as one Parquet file that can be mapped; note it as finished.

    Bad records are left out and reported. The same plan always gives the same bytes, so attempts of the same task may
    overtake each other: each writes under a name of its own and renames.

    Args:
        plan: Rows of the file.
        archive: Where they are read from.
        dataset: Folder of the dataset, which has the split's folder.
    """
    description = archive.description
    class_count = len(description.class_names)
    capacity = min(plan.rows_per_group, plan.rows)
    columns = {
        name: ColumnBuffer(shape, dtype, capacity)
        for name, (shape, dtype) in fixed_fields(description.groups, class_count).items()
    }
    schema = arrow_schema(description.groups, class_count)
    names = [group.name for group in description.groups]
    images = [{name: columns[name].row(place) for name in names} for place in range(capacity)]
    class_counts = np.zeros(class_count, np.int64)
    sums: dict[str, BandSums] = {}
    row_groups: list[int] = []
    rejected: list[dict[str, str]] = []
    ids: list[str] = []

    target = dataset / plan.file
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

    def flush(writer: pq.ParquetWriter) -> None:
        for name in names:
            added = BandSums.of(columns[name].values(len(ids)))
            sums[name] = sums[name] + added if name in sums else added
        arrays = [pa.array(ids, pa.string()), *(column.arrow(len(ids)) for column in columns.values())]
        writer.write_table(pa.table(arrays, schema=schema), row_group_size=len(ids))
        row_groups.append(len(ids))
        ids.clear()

    try:
        with pq.ParquetWriter(
            temporary, schema, compression="none", use_dictionary=False, write_statistics=False, data_page_size=1 << 30
        ) as writer:
            for sample in pa.ipc.open_stream(plan.samples).read_all().to_pylist():
                try:
                    archive.read(sample["paths"], images[len(ids)])
                except BadRecordError as error:
                    rejected.append(
                        {"id": sample["id"], "file": error.file, "reason": error.reason, "detail": error.detail}
                    )
                    continue
                labels = label_vector(sample["labels"], class_count)
                class_counts += labels
                columns[LABEL_FIELD].row(len(ids))[:] = labels
                ids.append(sample["id"])
                if len(ids) == capacity:
                    flush(writer)
            if ids:
                flush(writer)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    shard = Shard(file=plan.file, row_groups=tuple(row_groups), size=target.stat().st_size)
    written = WrittenShard(shard, class_counts.tolist(), sums, rejected)
    _note(written, dataset / plan.record)
    return written


def read_finished(plan: ShardPlan, dataset: Path) -> WrittenShard | None:
    """What an earlier attempt noted, if the file is still there as it was noted."""
    try:
        values = json.loads((dataset / plan.record).read_text())
        shard = Shard.model_validate_json(json.dumps(values["shard"]))
        if (dataset / shard.file).stat().st_size != shard.size:
            return None
    except (FileNotFoundError, ValueError):
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


def _note(written: WrittenShard, path: Path) -> None:
    values = {
        "shard": written.shard.model_dump(mode="json"),
        "class_counts": written.class_counts,
        "band_sums": {name: asdict(sums) for name, sums in written.band_sums.items()},
        "rejected": written.rejected,
    }
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(json.dumps(values))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
