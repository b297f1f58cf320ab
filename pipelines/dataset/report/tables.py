"""Tables of the dataset report, from the manifest, the labels and the rejected records."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.report.label_counts import classes_by_frequency, label_cooccurrence
from pipelines.dataset.report.published_statistics import PUBLISHED
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.folder import Location

_SPLIT_ORDER = (TRAINING_SPLIT, "validation", "test")
_CLASSES = 60
_REASONS = 20
_REJECTED = 100
_SHORT_NAME = 30  # characters; an archive's texts can be of any length
_LONG_TEXT = 300


def shorten(text: str, length: int = _SHORT_NAME) -> str:
    """Cut `text` to `length` characters if it is longer."""
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
    counts = pc.value_counts(rejected["reason"]).to_pylist()
    ordered = sorted(counts, key=lambda row: (-row["counts"], row["values"]))
    return [{"text": shorten(row["values"], _LONG_TEXT), "count": row["counts"]} for row in ordered[:_REASONS]]


def first_rejected(rejected: pa.Table) -> list[dict[str, str]]:
    """Return the first rejected records."""
    rows = rejected.slice(0, _REJECTED).to_pylist()
    return [{name: shorten(text, _LONG_TEXT) for name, text in row.items()} for row in rows]


def _split_names(manifest: Manifest) -> list[str]:
    known = [name for name in _SPLIT_ORDER if name in manifest.splits]
    return known + sorted(set(manifest.splits) - set(known))


def _readable(size: int) -> str:
    value, unit = size / 2**10, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:,.1f} {unit}"
