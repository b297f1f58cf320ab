"""Tables of the dataset report, from the manifest, the labels and the rejected records."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.dataset.format.columns import LABEL_FIELD
from pipelines.dataset.format.encoding import array_bytes, is_encoded
from pipelines.dataset.format.manifest import Manifest, Shard, Split
from pipelines.dataset.report.published_statistics import PUBLISHED
from pipelines.sample import SPLITS, TRAINING_SPLIT
from pipelines.storage.folder import Location

_CLASSES = 60
_REASONS = 20
_REJECTED = 100
_LONG_TEXT = 300
_COLUMNS = {"country": "Country", "season": "Season", "flags": "Flag"}
_SEASONS = ("winter", "spring", "summer", "autumn")
_UNKNOWN = "unknown"
_VALUES = 60
_LONG_NAME = 100


def shorten(text: str, length: int = 30) -> str:
    """Cut `text` to `length` characters if it is longer: an archive's texts can be of any length."""
    return text if len(text) <= length else text[: length - 1].rstrip(" ,") + "…"


def split_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Count the samples and files of each split."""
    total = max(1, sum(split.rows for split in manifest.splits.values()))
    return [
        {
            "name": name,
            "rows": split.rows,
            "share": split.rows / total,
            "shards": len(split.shards),
            "row_groups": sum(len(shard.row_groups) for shard in split.shards),
            "size": _readable(sum(shard.size for shard in split.shards)),
        }
        for name in _split_names(manifest)
        for split in [manifest.splits[name]]
    ]


def class_rows(manifest: Manifest) -> dict[str, Any]:
    """Count the samples of each class per split, the most frequent first; of too many classes, both ends.

    `width` is a share relative to the largest share of any class in any split.
    """
    training = manifest.splits[TRAINING_SPLIT].class_counts
    order = classes_by_frequency(training, _CLASSES)
    splits = [manifest.splits[name] for name in _split_names(manifest)]
    shares = [np.asarray(split.class_counts) / max(1, split.rows) for split in splits]
    largest = max(float(share.max()) for share in shares) or 1.0
    rows = [
        {
            "index": index,
            "name": shorten(manifest.class_names[index], _LONG_TEXT),
            "cells": [
                {"count": split.class_counts[index], "share": share[index], "width": share[index] / largest}
                for split, share in zip(splits, shares, strict=True)
            ],
        }
        for index in order
    ]
    return {"rows": rows, "hidden": len(training) - len(order), "absent": training.count(0)}


def class_balance_facts(manifest: Manifest) -> dict[str, Any]:
    """Return the median, most and least frequent class of the training split."""
    counts = manifest.splits[TRAINING_SPLIT].class_counts
    order = classes_by_frequency(counts, len(counts))
    most, least = (
        {"name": shorten(manifest.class_names[index]), "count": counts[index]} for index in (order[0], order[-1])
    )
    return {"median": int(np.median(counts)), "most": most, "least": least}


def cooccurrence_rows(dataset: Location, manifest: Manifest) -> list[dict[str, Any]]:
    """Count, for each class of `class_rows`, the training samples that also have each other class."""
    split = manifest.splits[TRAINING_SPLIT]
    order = classes_by_frequency(split.class_counts, _CLASSES)
    counts = label_cooccurrence(dataset, split.shards, len(manifest.class_names), order)
    percents = np.rint(100 * counts / np.maximum(np.diag(counts), 1)[:, None]).astype(int)
    return [
        {
            "name": shorten(manifest.class_names[index], _LONG_TEXT),
            "short": shorten(manifest.class_names[index]),
            "cells": [
                {"count": int(counts[row, column]), "percent": int(percents[row, column]), "same": row == column}
                for column in range(len(order))
            ],
        }
        for row, index in enumerate(order)
    ]


def band_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Return mean and deviation of each band, and the published ones or None."""
    return [
        {
            "group": group.name,
            "name": band,
            "mean": mean,
            "std": std,
            "published": PUBLISHED.get(manifest.archive, {}).get(band),
        }
        for group in manifest.groups
        for statistics in [manifest.statistics[group.name]]
        for band, mean, std in zip(group.bands, statistics.mean, statistics.std, strict=True)
    ]


def reason_counts(rejected: pa.Table) -> list[dict[str, Any]]:
    """Count rejected records by reason, the most frequent first."""
    ordered = sorted(pc.value_counts(rejected["reason"]).to_pylist(), key=lambda row: (-row["counts"], row["values"]))
    return [{"text": shorten(row["values"], _LONG_TEXT), "count": row["counts"]} for row in ordered[:_REASONS]]


def first_rejected(rejected: pa.Table) -> list[dict[str, str]]:
    """Return the first rejected records."""
    return [
        {name: shorten(text, _LONG_TEXT) for name, text in row.items()}
        for row in rejected.slice(0, _REJECTED).to_pylist()
    ]


def _split_names(manifest: Manifest) -> list[str]:
    known = [name for name in SPLITS if name in manifest.splits]
    return known + sorted(set(manifest.splits) - set(known))


def _readable(size: int) -> str:
    step = min(max(1, (size.bit_length() - 1) // 10), 4)
    return f"{size / 2 ** (10 * step):,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[step - 1]}"


def classes_by_frequency(counts: Sequence[int], limit: int) -> list[int]:
    """Return class indices, the most frequent first; of more than `limit`, half of the limit from each end."""
    order = sorted(range(len(counts)), key=lambda index: (-counts[index], index))
    if len(order) <= limit:
        return order
    return order[: limit // 2] + order[-(limit // 2) :]


def label_cooccurrence(
    dataset: Location | Path, shards: Sequence[Shard], class_count: int, classes: Sequence[int]
) -> NDArray[np.int64]:
    """Count the samples that have both of two classes, one row group at a time.

    Args:
        dataset: Folder of the dataset.
        shards: Shards to read.
        class_count: Length of a label vector.
        classes: The class indices to count, in the order of the result.

    Returns:
        `(len(classes), len(classes))`, symmetric; the diagonal holds the samples of each class.

    Raises:
        ValueError: A label is not a `uint8` vector of `class_count` values.
    """
    counts = np.zeros((len(classes), len(classes)), np.int64)
    for shard in shards:
        with Location.at(dataset).open(shard.file) as source, pq.ParquetFile(source) as file:
            for group in range(file.num_row_groups):
                for chunk in file.read_row_group(group, columns=[LABEL_FIELD])[LABEL_FIELD].chunks:
                    # Integer products do not use BLAS; single precision is exact below 2^24 samples.
                    labels = decode_labels(chunk, class_count)[:, classes].astype(np.float32)
                    counts += (labels.T @ labels).astype(np.int64)
    return counts


def decode_labels(column: pa.BinaryArray, class_count: int) -> NDArray[np.uint8]:
    """Return all encoded label vectors of `column` as `(rows, class_count)`, without work per row.

    Raises:
        ValueError: A value is not a `uint8` vector of `class_count` values.
    """
    field = (class_count,), np.dtype(np.uint8)
    if not is_encoded(column, *field):
        raise ValueError(f"column {LABEL_FIELD!r} does not hold uint8 vectors of {class_count} values")
    return array_bytes(column, *field)


def metadata_tables(dataset: Location, manifest: Manifest, splits: list[str]) -> list[dict[str, Any]]:
    """Make a table for each plain column with any known value.

    Args:
        dataset: A finished dataset.
        manifest: The dataset's `dataset.json`.
        splits: Names of the splits, in the order of the tables' columns.

    Returns:
        Tables with a `title` and `rows`; each row has a `name` and, by split, `cells` of `count` and `share`. Rows are
        sorted by frequency, seasons by the calendar; a sample may have several flags.
    """
    counts = {name: _value_counts(dataset, manifest.splits[name]) for name in splits}
    return [
        {"title": title, "rows": rows}
        for column, title in _COLUMNS.items()
        if (rows := _value_rows([(counts[name][column], manifest.splits[name].rows) for name in splits], column))
    ]


def _value_counts(dataset: Location, split: Split) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {column: Counter() for column in _COLUMNS}
    for shard in split.shards:
        with dataset.open(shard.file) as source, pq.ParquetFile(source) as file:
            table = file.read(columns=list(_COLUMNS))
        for column, counter in counts.items():
            values = table[column].combine_chunks()
            if isinstance(values, pa.ListArray):
                counter[_UNKNOWN] += values.null_count
                values = values.flatten()
            for row in pc.value_counts(values).to_pylist():
                counter[_UNKNOWN if row["values"] is None else row["values"]] += row["counts"]
    return counts


def _value_rows(splits: list[tuple[Counter[str], int]], column: str) -> list[dict[str, Any]]:
    total: Counter[str] = sum((counter for counter, _ in splits), Counter())
    if not set(total) - {_UNKNOWN}:
        return []
    names = [name for name, count in total.most_common() if count and name != _UNKNOWN][:_VALUES]
    if column == "season":
        names.sort(key=_SEASONS.index)
    names += [_UNKNOWN] * (total[_UNKNOWN] > 0)
    return [
        {
            "name": shorten(name.replace("_", " "), _LONG_NAME),
            "cells": [{"count": counter[name], "share": counter[name] / max(1, rows)} for counter, rows in splits],
        }
        for name in names
    ]
