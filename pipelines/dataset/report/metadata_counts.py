"""Counts the samples of each split by country, season and flag, using only the plain columns."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.dataset.format.manifest import Manifest, Split
from pipelines.dataset.report.tables import shorten
from pipelines.storage.folder import Location

_COLUMNS = {"country": "Country", "season": "Season", "flags": "Flag"}
_SEASONS = ("winter", "spring", "summer", "autumn")
_UNKNOWN = "unknown"
_MOST_ROWS = 60
_LONGEST_NAME = 100


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
    counts = {name: _counts(dataset, manifest.splits[name]) for name in splits}
    return [
        {"title": title, "rows": rows}
        for column, title in _COLUMNS.items()
        if (rows := _rows([(counts[name][column], manifest.splits[name].rows) for name in splits], column))
    ]


def _counts(dataset: Location, split: Split) -> dict[str, Counter[str]]:
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


def _rows(splits: list[tuple[Counter[str], int]], column: str) -> list[dict[str, Any]]:
    total: Counter[str] = sum((counter for counter, _ in splits), Counter())
    if not set(total) - {_UNKNOWN}:
        return []
    names = [name for name, count in total.most_common() if count and name != _UNKNOWN][:_MOST_ROWS]
    if column == "season":
        names.sort(key=_SEASONS.index)
    names += [_UNKNOWN] * (total[_UNKNOWN] > 0)
    return [
        {
            "name": shorten(name.replace("_", " "), _LONGEST_NAME),
            "cells": [{"count": counter[name], "share": counter[name] / max(1, rows)} for counter, rows in splits],
        }
        for name in names
    ]
