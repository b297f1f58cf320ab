"""Written shards: the marker of each, and the figures of all of them.

A marker says that a shard is finished, and holds figures for the report and for a repair.
"""

import base64
import functools
import gzip
import json
import operator
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.archives.archive import REJECTED_SCHEMA, ArchiveDescription
from pipelines.dataset.format.files import NOTES_FILE, REJECTED_FILE, note_name
from pipelines.dataset.format.manifest import Manifest, Shard, Split
from pipelines.dataset.format.statistics import BandSums
from pipelines.dataset.prepare.identity import Identity
from pipelines.machine.json_text import parse_json
from pipelines.sample import TRAINING_SPLIT, SettingValue
from pipelines.storage.folder import Location
from pipelines.storage.inventory import read_marker, read_markers


@dataclass(frozen=True)
class WrittenShard:
    """The result of writing one planned shard."""

    shard: Shard
    digest: str
    """`ShardPlan.digest` of the rows."""
    class_counts: list[int]
    band_sums: dict[str, BandSums]
    rejected: list[dict[str, str]]
    """Rows of `REJECTED_SCHEMA`."""


def write_note(written: WrittenShard, dataset: Location) -> None:
    """Write the marker of a finished shard."""
    dataset.write(note_name(written.shard.file), json.dumps(_values(written)).encode(), flush=False)


def write_earlier_note(written: WrittenShard, samples: bytes, dataset: Location) -> None:
    """Write a marker of the content of a shard that will be rewritten, and its samples (`ShardPlan.samples`)."""
    values = {**_values(written), "samples": base64.b64encode(samples).decode()}
    dataset.write(note_name(written.shard.file, earlier=True), json.dumps(values).encode(), flush=False)


def read_note(shard: str, dataset: Location) -> WrittenShard | None:
    """Read the marker of one shard; None if it is missing or damaged."""
    return read_marker(dataset, note_name(shard), _read)


def read_notes(dataset: Location, shards: Iterable[str]) -> dict[str, WrittenShard]:
    """Read the markers of these shards, as far as they exist."""
    return read_markers(dataset, {shard: note_name(shard) for shard in shards}, _read)


def read_earlier_notes(dataset: Location, shards: Iterable[str]) -> dict[str, tuple[WrittenShard, bytes]]:
    """Read the results of `write_earlier_note`: the content of each shard, and its samples."""

    def read(content: bytes) -> tuple[WrittenShard, bytes]:
        return _read(content), base64.b64decode(parse_json(content)["samples"])

    return read_markers(dataset, {shard: note_name(shard, earlier=True) for shard in shards}, read)


def write_all_notes(identity: Identity, shards: Iterable[WrittenShard], dataset: Location) -> None:
    """Write the markers of all shards as one file, which belongs to the finished dataset."""
    lines = [json.dumps(identity.as_json()), *(json.dumps(_values(written)) for written in shards)]
    dataset.write(NOTES_FILE, gzip.compress("\n".join(lines).encode(), mtime=0))


def read_all_notes(dataset: Location) -> tuple[Identity, dict[str, WrittenShard]] | None:
    """Read the result of `write_all_notes`: identity, and markers by shard; None if it is lost or damaged."""
    try:
        identity, *lines = gzip.decompress(dataset.read(NOTES_FILE)).decode().split("\n")
        notes = [_read(line) for line in lines]
        return Identity.from_json(parse_json(identity)), {written.shard.file: written for written in notes}
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        return None


def count_reasons(rejected: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Count bad records by reason, the most frequent first."""
    return dict(Counter(row["reason"] for row in rejected).most_common())


def check_rejected(
    rejected: Sequence[Mapping[str, str]], total: int, setting: str, allowed: float, report: str | None
) -> None:
    """Make sure that at most the allowed part of the records is bad.

    Args:
        rejected: The bad records, as rows of `REJECTED_SCHEMA`.
        total: Number of all records.
        setting: Key of the setting that limits the bad records.
        allowed: Value of the setting, a fraction.
        report: Location of the list of bad records; None: it is not written yet.

    Raises:
        ValueError: Too many records are bad.
    """
    if len(rejected) <= allowed * total:
        return
    counts = ", ".join(f"{reason} {count}" for reason, count in count_reasons(rejected).items())
    raise ValueError(
        f"{len(rejected)} of {total} samples are bad ({counts}), more than {setting}={allowed}; the first: "
        f"{rejected[0]['file']}: {rejected[0]['reason']}; mend the files, or allow more, and the same command continues"
        + (f"; all of them: {report}" if report else "")
    )


def write_rejected(rejected: list[dict[str, str]], staging: Location) -> None:
    """Write the list of bad records."""
    with staging.new_file(REJECTED_FILE) as path:
        pq.write_table(pa.Table.from_pylist(rejected, schema=REJECTED_SCHEMA), path)


def summarise(
    description: ArchiveDescription,
    written: dict[str, list[WrittenShard]],
    settings: dict[str, int],
    read_settings: Mapping[str, SettingValue],
    source: str,
    rejected: list[dict[str, str]],
) -> Manifest:
    """Describe the dataset that these shards form, by split.

    Raises:
        ValueError: A split has no good sample.
    """
    empty = [split for split, shards in sorted(written.items()) if not sum(each.shard.rows for each in shards)]
    if empty:
        raise ValueError(f"every sample of the split {' and of the split '.join(map(repr, empty))} is bad")
    return Manifest(
        archive=description.kind,
        task=description.task,
        class_names=description.class_names,
        groups=description.groups,
        splits={
            split: Split(
                shards=tuple(result.shard for result in shards),
                class_counts=tuple(np.sum([result.class_counts for result in shards], axis=0).tolist()),
            )
            for split, shards in written.items()
        },
        statistics={name: sums.statistics() for name, sums in merge_sums(written[TRAINING_SPLIT]).items()},
        settings=settings,
        read_settings=dict(read_settings),
        source_fingerprint=source,
        skipped=count_reasons(rejected),
    )


def merge_sums(shards: list[WrittenShard]) -> dict[str, BandSums]:
    """Add up the band sums of several shards, by image group."""
    sums = [result.band_sums for result in shards if result.band_sums]
    return {name: functools.reduce(operator.add, (part[name] for part in sums)) for name in sums[0]}


def _values(written: WrittenShard) -> dict[str, Any]:
    return {
        "shard": written.shard.model_dump(mode="json"),
        "digest": written.digest,
        "class_counts": written.class_counts,
        "band_sums": {name: vars(sums) for name, sums in written.band_sums.items()},
        "rejected": written.rejected,
    }


def _read(content: str | bytes) -> WrittenShard:
    values = parse_json(content)
    sums = {
        name: BandSums(
            value["count"],
            tuple(value["total"]),
            tuple(value["squares"]),
            tuple(tuple(band) for band in value["histogram"]),
        )
        for name, value in values["band_sums"].items()
    }
    shard = Shard.model_validate_json(json.dumps(values["shard"]))
    return WrittenShard(shard, values["digest"], values["class_counts"], sums, values["rejected"])
