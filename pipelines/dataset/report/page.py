"""Writes `report.html`, one page that shows a finished dataset and needs no other file."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.dataset.format.columns import ID_FIELD, LABEL_FIELD
from pipelines.dataset.format.files import REPORT_FILE
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.report.figures import band_histogram, class_balance, preview, shown_bins
from pipelines.dataset.report.html import render
from pipelines.dataset.report.published_statistics import PUBLISHED
from pipelines.dataset.report.tables import (
    band_rows,
    class_balance_facts,
    class_rows,
    cooccurrence_rows,
    first_rejected,
    metadata_tables,
    reason_counts,
    shorten,
    split_rows,
)
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.folder import Location

_PREVIEWS = 24
_HISTOGRAMS = 32
_LABELS_PER_PREVIEW = 6

Histograms = Mapping[str, tuple[tuple[int, ...], ...]]


def write_report(dataset: Location | Path | str, manifest: Manifest, histograms: Histograms, rejected: pa.Table) -> str:
    """Write `<dataset>/report.html` atomically.

    Args:
        dataset: Folder of a finished dataset.
        manifest: The dataset's `dataset.json`.
        histograms: `BandSums.histogram` of the training split, by image group; empty for floating-point bands.
        rejected: Bad records, `REJECTED_SCHEMA`.

    Returns:
        The page's path or URL.

    Raises:
        FileNotFoundError: `dataset` is not a finished dataset, or a shard is missing.
        ValueError: A shard differs from the manifest.
    """
    dataset = Location.at(dataset)
    splits = split_rows(manifest)
    single_label = manifest.task == "single_label"
    page = render(
        "dataset/report/page.html",
        manifest=manifest,
        splits=splits,
        classes=class_rows(manifest),
        metadata=metadata_tables(dataset, manifest, [split["name"] for split in splits]),
        balance=class_balance_facts(manifest) if single_label else None,
        balance_plot=class_balance(manifest.splits[TRAINING_SPLIT].class_counts) if single_label else None,
        matrix=None if single_label else cooccurrence_rows(dataset, manifest),
        published=manifest.archive in PUBLISHED,
        bands=band_rows(manifest),
        histograms=_histograms(manifest, histograms),
        samples=_samples(dataset, manifest),
        reasons=reason_counts(rejected),
        rejected=first_rejected(rejected),
        rejected_total=len(rejected),
    )
    dataset.write(REPORT_FILE, page.encode())
    return f"{dataset}/{REPORT_FILE}"


def _histograms(manifest: Manifest, histograms: Histograms) -> list[dict[str, Any]]:
    """Draw one plot per band, with the same axis within an image group."""
    plots: list[dict[str, Any]] = []
    for group in manifest.groups:
        counts = histograms.get(group.name, ())[: _HISTOGRAMS - len(plots)]
        right = shown_bins(counts, group.dtype)
        for band, mean, histogram in zip(group.bands, manifest.statistics[group.name].mean, counts, strict=False):
            plots.append(
                {"group": group.name, "name": band, "plot": band_histogram(histogram, mean, right, group.dtype)}
            )
    return plots


def _first_rows(dataset: Location, manifest: Manifest) -> pa.Table:
    """Read only as many row groups as needed: rows are shuffled, and 24 pictures do not justify reading a dataset."""
    tables: list[pa.Table] = []
    for shard in manifest.splits[TRAINING_SPLIT].shards:
        with dataset.open(shard.file) as source, pq.ParquetFile(source) as file:
            for group in range(file.num_row_groups):
                tables.append(file.read_row_group(group))
                if sum(map(len, tables)) >= _PREVIEWS:
                    return pa.concat_tables(tables)
    return pa.concat_tables(tables)


def _samples(dataset: Location, manifest: Manifest) -> list[dict[str, Any]]:
    """Return some samples of the training split's first row groups, drawn by the manifest's fingerprint."""
    table = _first_rows(dataset, manifest)
    random = np.random.default_rng(int(manifest.fingerprint[:16], 16))
    rows = np.sort(random.choice(len(table), size=min(_PREVIEWS, len(table)), replace=False))
    samples = []
    for row in table.take(pa.array(rows)).to_pylist():
        classes = np.flatnonzero(np.load(io.BytesIO(row[LABEL_FIELD])))
        names = [shorten(manifest.class_names[index]) for index in classes[:_LABELS_PER_PREVIEW]]
        images = {group.name: np.load(io.BytesIO(row[group.name])) for group in manifest.groups}
        samples.append(
            {
                "id": shorten(row[ID_FIELD], 100),
                "labels": names + [f"+{len(classes) - len(names)}"] * (len(classes) > len(names)),
                "image": preview(images, manifest.groups),
            }
        )
    return samples
