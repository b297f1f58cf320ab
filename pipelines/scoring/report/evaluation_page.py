"""One page that shows an evaluation and needs no other file."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from models.calibration import Reliability
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.read.reader import SplitReader
from pipelines.dataset.report.figures import Colors, Plot, plot, preview
from pipelines.dataset.report.html import render
from pipelines.dataset.report.tables import shorten
from pipelines.scoring.report.evaluation import Measured, SliceScores, SplitScores
from pipelines.tracking import metrics

_PATCHES = 12
_SHOWN_SLICES = 40
_SHOWN_PAIRS = 25
_LABELS = 5


def evaluation_page(
    measured: Measured, scores: SplitScores, readers: Sequence[SplitReader], split: str, facts: Mapping[str, str]
) -> str:
    """Return the page as text.

    Args:
        measured: Measurements to show.
        scores: Predictions of the samples, in row order.
        readers: Readers of the splits in the order of the samples, for the best and the worst patches.
        split: Name of the splits.
        facts: Texts at the top of the page by name: the model, the dataset.
    """
    manifest = readers[0].manifest
    order = np.argsort(scores.losses(manifest.task), kind="stable")
    described = metrics.described()
    return render(
        "scoring/evaluation_page.html",
        split=split,
        samples=len(scores.ids),
        facts=dict(facts),
        metrics=[
            {"name": name, "value": value, "text": described.get(f"test/{name}", "").partition(": ")[2]}
            for name, value in measured.metrics.items()
        ],
        classes=sorted(measured.per_class, key=lambda row: -row["support"]),
        tuned=measured.thresholds is not None,
        reliability=_reliability_plot(measured.reliability),
        reliability_rows=_reliability_rows(measured.reliability),
        slices=_slice_tables(measured.slices),
        pairs=measured.pairs[:_SHOWN_PAIRS],
        best=_patches(order[:_PATCHES], scores, readers, manifest),
        worst=_patches(order[::-1][:_PATCHES], scores, readers, manifest),
    )


def _patches(
    rows: "np.ndarray[Any, np.dtype[np.int64]]", scores: SplitScores, readers: Sequence[SplitReader], manifest: Manifest
) -> list[dict[str, Any]]:
    """Return samples as pictures, with their labels and predictions."""
    losses, ends = scores.losses(manifest.task), np.cumsum([len(reader) for reader in readers])
    found = []
    for row in rows.tolist():
        place = int(np.searchsorted(ends, row, side="right"))
        images = readers[place].gather(np.array([row - ends[place] + len(readers[place])])).images
        likely = np.argsort(-scores.probabilities[row])[:_LABELS]
        found.append(
            {
                "id": shorten(scores.ids[row], 100),
                "image": preview({name: pixels[0] for name, pixels in images.items()}, manifest.groups),
                "labels": [shorten(manifest.class_names[each]) for each in np.flatnonzero(scores.targets[row])],
                "predicted": [
                    {
                        "name": shorten(manifest.class_names[each]),
                        "percent": round(100 * float(scores.probabilities[row, each])),
                        "right": bool(scores.targets[row, each]),
                    }
                    for each in likely
                ],
                "loss": float(losses[row]),
            }
        )
    return found


def _slice_tables(rows: Sequence[SliceScores]) -> list[dict[str, Any]]:
    by_column = [[row for row in rows if row.column == column] for column in dict.fromkeys(row.column for row in rows)]
    return [
        {
            "title": own[0].column.capitalize(),
            "names": [name.replace("_", " ") for name in own[0].metrics],
            "rows": [
                {"value": row.value, "samples": row.samples, "scores": [row.metrics[name] for name in own[0].metrics]}
                for row in own[:_SHOWN_SLICES]
            ],
            "hidden": max(0, len(own) - _SHOWN_SLICES),
        }
        for own in by_column
    ]


def _reliability_rows(reliability: Reliability) -> list[dict[str, Any]]:
    bins = len(reliability.counts)
    return [
        {
            "range": f"{number / bins:.2f} to {(number + 1) / bins:.2f}",
            "count": int(reliability.counts[number]),
            "confidence": float(reliability.confidence[number]),
            "accuracy": float(reliability.accuracy[number]),
        }
        for number in range(bins)
        if reliability.counts[number]
    ]


def _reliability_plot(reliability: Reliability) -> Plot:
    """Draw the fraction of right decisions by predicted probability; calibrated probabilities are on the diagonal."""

    def draw(axis: Axes, colors: Colors) -> None:
        used = reliability.counts > 0
        axis.plot([0, 1], [0, 1], color=colors.text, linewidth=0.8, linestyle=":")
        axis.plot(reliability.confidence[used], reliability.accuracy[used], color=colors.fill, marker="o", markersize=4)
        axis.set(xlim=(0, 1), ylim=(0, 1))
        axis.set_xlabel("mean probability", color=colors.text, fontsize=8)
        axis.set_ylabel("part that is right", color=colors.text, fontsize=8)

    return plot(draw, width=360, height=320)
