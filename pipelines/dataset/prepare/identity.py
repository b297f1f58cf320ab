"""The identity of a dataset: the settings and the index of samples that decide its rows.

Two calls with the same identity write the same dataset. The index is stored in it to detect later changes.
"""

import hashlib
import io
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.archives.archive import (
    INDEX_SCHEMA,
    ArchiveDescription,
    ArchiveIndex,
    kept_fields,
)
from pipelines.dataset.format.files import INDEX_FILE
from pipelines.sample import ID_SETTING, KEPT_SETTING, SettingValue
from pipelines.storage.folder import Location
from pipelines.storage.inventory import differences

_INDEX = "index"
_LEFT_OUT = (ID_SETTING, KEPT_SETTING)
"""Settings that an archive leaves out where they are not set."""


@dataclass(frozen=True)
class Identity:
    """Settings, classes and images of a dataset, and a digest of its samples."""

    settings: Mapping[str, SettingValue]
    """Settings by names that messages show."""
    index: str | None = None
    """Digest of the samples; None: unknown."""

    @classmethod
    def from_json(cls, values: Mapping[str, SettingValue]) -> "Identity":
        """Read the result of `as_json`.

        Raises:
            TypeError: The digest of the samples is not a string.
        """
        index = values.get(_INDEX)
        if index is not None and not isinstance(index, str):
            raise TypeError(f"{_INDEX} must be a text, got {index!r}")
        return cls({name: value for name, value in values.items() if name != _INDEX}, index)

    def as_json(self) -> dict[str, SettingValue]:
        """Return the settings, and the digest of the samples where it is known."""
        return {**self.settings} if self.index is None else {**self.settings, _INDEX: self.index}

    def differences(self, wanted: "Identity") -> list[str]:
        """Name the settings that differ; a setting that is unknown here does not count."""
        unset = dict.fromkeys(_LEFT_OUT)
        return differences({**wanted.settings, **unset, **self.settings}, {**unset, **wanted.settings})


def describe(description: ArchiveDescription, read_settings: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """Return the kind, classes and images, which decide the rows together with the samples, under readable names."""
    names = json.dumps([description.task, *description.class_names]).encode()
    return {
        "archive": description.kind,
        **read_settings,
        "classes": f"{len(description.class_names)} ({hashlib.sha256(names).hexdigest()[:8]})",
        "images": [
            f"{group.name} {'x'.join(map(str, group.shape))} {group.dtype} {','.join(group.bands)}"
            for group in description.groups
        ],
    }


_COMPARED_AT_ONCE = 4096


def index_digest(samples: pa.Table) -> str:
    """Compute SHA-256 over all rows and columns of an index.

    Args:
        samples: `INDEX_SCHEMA`.
    """
    # Equal arrays may have other bytes under their nulls, for example from another version of pyarrow or from Parquet.
    # `take` gives the same bytes in every version.
    samples = samples.take(pa.array(np.arange(len(samples))))
    sink = _DigestSink()
    with pa.ipc.new_stream(pa.PythonFile(sink), samples.schema) as writer:
        writer.write_table(samples.combine_chunks(), max_chunksize=1 << 16)
    return sink.digest.hexdigest()


class _DigestSink(io.RawIOBase):
    """A writable file that only computes the digest of its content."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)


def write_index(samples: pa.Table, dataset: Location) -> None:
    """Write the index into a dataset; it compresses well, because neighbouring ids and paths are similar."""
    with dataset.new_file(INDEX_FILE) as path:
        pq.write_table(samples, path, compression="zstd")


def read_index(dataset: Location) -> pa.Table | None:
    """Read a dataset's index; None if it is lost or damaged."""
    try:
        table = pq.read_table(pa.BufferReader(dataset.read(INDEX_FILE)))
        schema = pa.schema([*INDEX_SCHEMA, *kept_fields(table.schema)])
        return table.select(schema.names).cast(schema)
    except (OSError, KeyError, ValueError, pa.ArrowException):
        return None


def compare(before: pa.Table, now: pa.Table, settled: Collection[str]) -> str:
    """Count the samples that are in only one index, and those that differ.

    Changed samples have another split, or other labels, files or metadata.

    Args:
        before: The earlier index.
        now: The current index.
        settled: Ids of the samples in finished shards. For others only another split counts as a difference.

    Returns:
        The counts and the id of one sample, as a text; empty if the indexes do not differ.
    """
    places = pc.index_in(before["id"].combine_chunks(), now["id"].combine_chunks())
    removed = before["id"].filter(pc.is_null(places)).to_pylist()
    added = now["id"].filter(pc.invert(pc.is_in(now["id"], before["id"].combine_chunks()))).to_pylist()
    both = before.filter(pc.is_valid(places)), now.take(places.drop_null())
    changed: list[str] = []
    for start in range(0, len(both[0]), _COMPARED_AT_ONCE):
        old, new = (table.slice(start, _COMPARED_AT_ONCE) for table in both)
        if not old.equals(new):
            for row, other in zip(old.to_pylist(), new.to_pylist(), strict=True):
                if row["split"] != other["split"] or (row != other and row["id"] in settled):
                    changed.append(row["id"])
    examples = added or removed or changed
    counts = f"{len(added)} samples added, {len(removed)} removed, {len(changed)} changed"
    return f"{counts}, for example {examples[0]}" if examples else ""


def with_known_samples(before: pa.Table, index: ArchiveIndex) -> ArchiveIndex:
    """Take the known values of samples from the earlier index where their files cannot be read now.

    If the labels of a patch are in its folder, they are unknown when the folder is missing. But its row may be in a
    finished shard.

    Args:
        before: The earlier index.
        index: The current index; its ids and splits do not change.
    """
    lost = before.filter(pc.is_in(before["id"], index.unusable["id"].combine_chunks()))
    return replace(index, samples=with_rows(index.samples, lost))


def with_rows(samples: pa.Table, others: pa.Table) -> pa.Table:
    """Replace the rows of some samples by those of another index; ids, splits and order do not change.

    Args:
        samples: `INDEX_SCHEMA`.
        others: `INDEX_SCHEMA`: the replacements; samples that are not in `samples` are ignored.
    """
    taken = pc.index_in(samples["id"].combine_chunks(), others["id"].combine_chunks())
    if taken.null_count == len(samples):
        return samples
    is_taken = taken.is_valid().to_numpy(zero_copy_only=False)
    places = np.where(is_taken, len(samples) + taken.fill_null(0).to_numpy(), np.arange(len(samples)))
    mixed = pa.concat_tables([samples, others]).take(pa.array(places)).combine_chunks()
    split = samples.schema.get_field_index("split")
    return mixed.set_column(split, samples.schema.field(split), samples["split"])
