"""`report.html`: a finished dataset to look at, as one page that needs nothing else."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import Environment, StrictUndefined

from pipelines.dataset.manifest import Manifest
from pipelines.dataset.published_statistics import PUBLISHED
from pipelines.dataset.reader import SplitReader
from pipelines.dataset.report_figures import band_histogram, class_balance, preview, shown_bins
from pipelines.dataset.report_style import STYLE
from pipelines.dataset.report_tables import (
    TRAINING_SPLIT,
    band_rows,
    class_balance_facts,
    class_rows,
    cooccurrence_rows,
    first_rejected,
    reason_counts,
    shorten,
    split_rows,
)
from pipelines.dataset.report_template import TEMPLATE

FILE_NAME = "report.html"

_PREVIEWS = 24
_HISTOGRAMS = 32
_LABELS_PER_PREVIEW = 6

Histograms = Mapping[str, tuple[tuple[int, ...], ...]]


def write_report(dataset: Path, manifest: Manifest, histograms: Histograms, rejected: pa.Table) -> Path:
    """Write `<dataset>/report.html`, whole or not at all.

    Names, ids and paths come from archives that nobody checked: everything is escaped, and the page's own policy
    forbids scripts and addresses.

    Args:
        dataset: Folder of a finished dataset.
        manifest: Its `dataset.json`.
        histograms: `BandSums.histogram` of the training split, by image group; empty for floating-point bands.
        rejected: `REJECTED_SCHEMA`.

    Returns:
        The page.

    Raises:
        FileNotFoundError: `dataset` is not a finished dataset, or a shard is missing.
        ValueError: A shard is not what the manifest says.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    single_label = manifest.task == "single_label"
    page = environment.from_string(TEMPLATE).render(
        style=STYLE,
        manifest=manifest,
        splits=split_rows(manifest),
        classes=class_rows(manifest),
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
    path = dataset / FILE_NAME
    temporary = dataset / f".{FILE_NAME}.{os.getpid()}"
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _histograms(manifest: Manifest, histograms: Histograms) -> list[dict[str, Any]]:
    """One plot per band, with the same axis within an image group."""
    plots: list[dict[str, Any]] = []
    for group in manifest.groups:
        counts = histograms.get(group.name, ())[: _HISTOGRAMS - len(plots)]
        right = shown_bins(counts, group.dtype)
        for band, mean, histogram in zip(group.bands, manifest.statistics[group.name].mean, counts, strict=False):
            plot = band_histogram(histogram, mean, right, group.dtype)
            plots.append({"group": group.name, "name": band, "plot": plot})
    return plots


def _samples(dataset: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Some samples of the training split, drawn by the manifest's fingerprint."""
    reader = SplitReader(dataset, TRAINING_SPLIT)
    random = np.random.default_rng(int(manifest.fingerprint[:16], 16))
    rows = np.sort(random.choice(len(reader), size=min(_PREVIEWS, len(reader)), replace=False))
    batch, ids = reader.gather(rows), reader.ids()
    samples = []
    for place, row in enumerate(rows.tolist()):
        classes = np.flatnonzero(batch.targets[place])
        names = [shorten(manifest.class_names[index]) for index in classes[:_LABELS_PER_PREVIEW]]
        images = {name: group[place] for name, group in batch.images.items()}
        samples.append(
            {
                "id": shorten(ids[row], 100),
                "labels": names + [f"+{len(classes) - len(names)}"] * (len(classes) > len(names)),
                "image": preview(images, manifest.groups),
            }
        )
    return samples
