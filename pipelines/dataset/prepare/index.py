"""The archive's index as a dataset keeps it, to find out what changed in the archive since."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.archives.archive import INDEX_SCHEMA, ArchiveIndex
from pipelines.dataset.format.files import INDEX_FILE
from pipelines.storage.folder import Folder

_COMPARED_AT_ONCE = 4096


@dataclass(frozen=True)
class IndexChanges:
    """What is different between two indexes, by the ids of the samples."""

    added: list[str]
    removed: list[str]
    changed: list[str]
    """Another split, other labels, files or metadata."""
    moved: list[str]
    """Those of the changed that are in another split."""

    def of(self, settled: Collection[str]) -> "IndexChanges":
        """Forgive other labels, files and metadata of the samples that are in no finished shard."""
        moved = set(self.moved)
        return replace(self, changed=[name for name in self.changed if name in settled or name in moved])

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        """Give the counts, and an example."""
        first = next(iter(self.added or self.removed or self.changed), "")
        counts = f"{len(self.added)} samples added, {len(self.removed)} removed, {len(self.changed)} changed"
        return f"{counts}, for example {first}" if first else counts


def index_digest(samples: pa.Table) -> str:
    """Compute SHA-256 over all rows and columns of an index.

    Args:
        samples: `INDEX_SCHEMA`.
    """
    # Equal arrays may have other bytes under their nulls, for example those that another version of pyarrow makes or
    # that were read from Parquet. Rows that are taken have the same bytes in every version.
    samples = samples.take(pa.array(np.arange(len(samples))))
    sink = _DigestSink()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), samples.schema) as writer:
        writer.write_table(samples.combine_chunks(), max_chunksize=1 << 16)
    return sink.digest.hexdigest()


class _DigestSink:
    """A file that keeps the digest of what is written to it."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.closed = False

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        """Nothing waits to be written."""

    def close(self) -> None:
        self.closed = True


def write_index(samples: pa.Table, dataset: Folder) -> None:
    """Keep the index in a dataset; neighbouring ids and paths share their beginnings, which takes little space."""
    with dataset.new_file(INDEX_FILE) as path:
        pq.write_table(samples, path, compression="zstd")


def read_index(dataset: Folder) -> pa.Table | None:
    """Read the index that a dataset keeps; None where it is lost or damaged."""
    try:
        table = pq.read_table(pa.BufferReader(dataset.read(INDEX_FILE)))
        return table.select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)
    except (OSError, KeyError, ValueError, pa.ArrowException):
        return None


def compare(before: pa.Table, now: pa.Table) -> IndexChanges:
    """Find the samples that are in one index only, and those that are not the same in both."""
    places = pc.index_in(before["id"].combine_chunks(), now["id"].combine_chunks())
    removed = before["id"].filter(pc.is_null(places)).to_pylist()
    added = now["id"].filter(pc.invert(pc.is_in(now["id"], before["id"].combine_chunks()))).to_pylist()
    both = before.filter(pc.is_valid(places)), now.take(places.drop_null())
    moved = both[0]["id"].filter(pc.not_equal(both[0]["split"], both[1]["split"])).to_pylist()
    changed: list[str] = []
    for start in range(0, len(both[0]), _COMPARED_AT_ONCE):
        old, new = (table.slice(start, _COMPARED_AT_ONCE) for table in both)
        if not old.equals(new):
            rows = zip(old.to_pylist(), new.to_pylist(), strict=True)
            changed += [row["id"] for row, other in rows if row != other]
    return IndexChanges(added, removed, changed, moved)


def keep_known(before: pa.Table, index: ArchiveIndex) -> ArchiveIndex:
    """Take what is known of samples from the earlier index where their files cannot be read now.

    Where the labels of a patch are in its folder, they are unknown when the folder is gone. But its row may be in a
    shard that is finished.

    Args:
        before: The earlier index.
        index: The index now; its ids and splits stay.
    """
    lost = before.filter(pc.is_in(before["id"], index.unusable["id"].combine_chunks()))
    return replace(index, samples=with_rows(index.samples, lost))


def with_rows(samples: pa.Table, others: pa.Table) -> pa.Table:
    """Take the rows of some samples from another index; ids, splits and order stay.

    Args:
        samples: `INDEX_SCHEMA`.
        others: `INDEX_SCHEMA`: rows that are taken; those of samples that are not in `samples` are left out.
    """
    taken = pc.index_in(samples["id"].combine_chunks(), others["id"].combine_chunks())
    if taken.null_count == len(samples):
        return samples
    is_taken = taken.is_valid().to_numpy(zero_copy_only=False)
    places = np.where(is_taken, len(samples) + taken.fill_null(0).to_numpy(), np.arange(len(samples)))
    mixed = pa.concat_tables([samples, others]).take(pa.array(places)).combine_chunks()
    split = samples.schema.get_field_index("split")
    return mixed.set_column(split, samples.schema.field(split), samples["split"])
