"""The tables of a comparison, for its page and as CSV."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.ticker import EngFormatter

from pipelines.comparison.facts import Facts, peak_rate, warmup_text
from pipelines.comparison.groups import DatasetGroups, Group, Spread, alike_troubles, baseline_of, word_of
from pipelines.comparison.run import SEED
from pipelines.dataset.report.tables import shorten
from pipelines.machine.console import cell

UNKNOWN = "-"
"""Text for a value that is not recorded."""
CSV_MARK = b"dataset,group,"
"""First bytes of the tables."""
_DIFFERING = 40
_LONG = 120


def recipe_rows(part: DatasetGroups) -> list[dict[str, Any]]:
    """Return recipe, score, time and bytes of each group, as the page shows them."""
    return [
        {
            "number": group.number,
            "label": shorten(group.label, _LONG),
            "seeds": group.seeds,
            "trainings": len(group.members),
            "batch": _shown(group.first.global_batch_size, "{:,}".format),
            "workers": _shown(group.first.workers, "{:,}".format),
            "warmup": warmup_text(group.first.run),
            "rate": _shown(peak_rate(group.first.run), "{:.4g}".format),
            "optimizer": shorten(group.settings.get("optimizer.name", UNKNOWN)),
            "codec": shorten(group.settings.get("exchange.codec.name", UNKNOWN)),
            "precision": shorten(group.settings.get("training.precision", UNKNOWN)),
            "epochs": _range([facts.epochs for facts in group.members]),
            "steps": _range([facts.steps or 0 for facts in group.members]),
            "score": score_text(group.score),
            "with_diverged": score_text(group.score_with_diverged) if group.diverged else "",
            "last": score_text(group.spread(lambda facts: facts.last)),
            "time": _shown(_mean(group.spread(lambda facts: facts.seconds)), duration),
            "per_step": _shown(_mean(group.spread(lambda facts: facts.seconds_per_step)), _seconds_text),
            "rate_of_images": _shown(_mean(group.spread(lambda facts: facts.images_per_second)), _number),
            "bytes": _shown(_mean(group.spread(lambda facts: facts.payload_bytes)), _size_text),
            "speedup": _shown(speedup(group, baseline_of(part, group)), "{:.2f}".format),
            "efficiency": _shown(efficiency(group, baseline_of(part, group)), lambda ratio: f"{100 * ratio:.0f} %"),
            "diverged": group.diverged,
            "mark": _mark(group),
        }
        for group in part.groups
    ]


def _mark(group: Group) -> str:
    """Return how many trainings of the group diverged or did not finish, and the reasons."""
    alike, total = alike_troubles(group.members), len(group.members)
    reasons = "; ".join(same[0].trouble for same in alike)
    return f"{sum(map(len, alike))} of {total} trainings {reasons}" if reasons and total > 1 else reasons


def differing_rows(part: DatasetGroups) -> dict[str, Any]:
    """Return only the settings that are not the same in all groups."""
    keys = part.differing[:_DIFFERING]
    return {
        "keys": [{"name": key, "word": word_of(key)} for key in keys],
        "rows": [
            {
                "number": group.number,
                "cells": [shorten(group.settings.get(key, "not set"), _LONG) for key in keys],
            }
            for group in part.groups
        ],
        "hidden": len(part.differing) - len(keys),
    }


def importance_of(part: DatasetGroups) -> dict[str, float]:
    """Return the share of the score's variance that each setting explains alone, the largest first, from 0 to 1.

    It is epsilon squared, `max(0, 1 - (within / (n - k)) / (total / (n - 1)))`. `n` trainings ended well, and the
    setting has `k` values. `total` sums the squared distances of the scores to their mean, and `within` those to
    the mean of the trainings with the same value. So a setting with many values gains nothing by their number. Shares
    of settings that were changed together overlap, and need not sum to 1.

    Settings without two values, or with a value per training, are left out; so is one that separates the trainings
    exactly as an earlier setting does.

    Source: Kelley, "An unbiased correlation ratio measure", 1935.
    """
    counted = [(group.settings, facts) for group in part.groups for facts in group.members if facts.counts]
    scores = [facts.best or 0.0 for _, facts in counted]
    variance, shares, seen = statistics.variance(scores) if len(scores) > 2 else 0.0, {}, set()
    for key in part.differing:
        values = [settings.get(key) for settings, _ in counted]
        places = [values.index(value) for value in values]
        free = len(scores) - len(set(places))
        if not variance or tuple(places) in seen or not 0 < free < len(scores) - 1:
            continue
        seen.add(tuple(places))
        of_value = [[score for score, own in zip(scores, places, strict=True) if own == place] for place in set(places)]
        within = sum(statistics.pvariance(each) * len(each) for each in of_value)
        shares[key] = max(0.0, 1 - within / free / variance)
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def target_rows(part: DatasetGroups, metric: str, target: float) -> list[dict[str, Any]]:
    """Return each group's cost of reaching the target, the fastest first; groups that did not reach it are last."""
    rows = [(group, group.reached(metric, target)) for group in part.groups]
    longest = max((reached.seconds or 0.0 for _, reached in rows if reached), default=0.0) or 1.0
    shown = [
        {
            "number": group.number,
            "label": shorten(group.label, _LONG),
            "reached": reached is not None,
            "of": f"{reached.seeds if reached else 0} of {group.seeds}",
            "epochs": f"{reached.epochs:.3g}" if reached else UNKNOWN,
            "steps": _shown(reached.steps if reached else None, _number),
            "samples": _shown(reached.samples if reached else None, _number),
            "seconds": reached.seconds if reached else None,
            "time": _shown(reached.seconds if reached else None, duration),
            "width": (reached.seconds or 0.0) / longest if reached else 0.0,
            "bytes": _shown(reached.payload_bytes if reached else None, _size_text),
        }
        for group, reached in rows
    ]
    return sorted(shown, key=lambda row: (not row["reached"], row["seconds"] or 0.0))


def table_rows(parts: Sequence[DatasetGroups], metric: str, target_of: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return the table: a row per group with full numbers, and a column for each setting that differs."""
    differing = sorted({key for part in parts for key in part.differing})
    rows: list[dict[str, Any]] = []
    for part, target in zip(parts, target_of, strict=True):
        for group in part.groups:
            baseline = baseline_of(part, group)
            reached = None if target is None else group.reached(metric, target)
            score, last = group.score, group.spread(lambda facts: facts.last)
            rows.append(
                {
                    "dataset": part.dataset,
                    "group": group.number,
                    "label": group.label,
                    "seeds": group.seeds,
                    "seeds in the mean": 0 if score is None else score.count,
                    "diverged": group.diverged,
                    **_recipe_values(group),
                    f"{metric} best": None if score is None else score.mean,
                    f"{metric} best deviation": None if score is None else score.deviation,
                    f"{metric} best with diverged": _mean(group.score_with_diverged or score),
                    f"{metric} last": None if last is None else last.mean,
                    "training seconds": _mean(group.spread(lambda facts: facts.seconds)),
                    "seconds per step": _mean(group.spread(lambda facts: facts.seconds_per_step)),
                    "images per second": _mean(group.spread(lambda facts: facts.images_per_second)),
                    "payload bytes of a rank": _mean(group.spread(lambda facts: facts.payload_bytes)),
                    "speed-up": speedup(group, baseline),
                    "efficiency": efficiency(group, baseline),
                    "target": target,
                    "seeds at target": reached.seeds if reached else 0,
                    "epochs to target": reached.epochs if reached else None,
                    "steps to target": reached.steps if reached else None,
                    "training seconds to target": reached.seconds if reached else None,
                    **{f"setting {key}": group.settings.get(key) for key in differing},
                }
            )
    return rows


def runs_csv(parts: Sequence[DatasetGroups], metric: str) -> str:
    """Return every training as a row of CSV, with all its settings and last values."""
    return csv_of(
        [_run_row(part, group, facts, metric) for part in parts for group in part.groups for facts in group.members]
    )


def speedup(group: Group, baseline: Group | None) -> float | None:
    """Return the ratio of samples per second to the baseline's."""
    ours = _mean(group.spread(lambda facts: facts.images_per_second))
    theirs = None if baseline is None else _mean(baseline.spread(lambda facts: facts.images_per_second))
    return ours / theirs if ours and theirs else None


def efficiency(group: Group, baseline: Group | None) -> float | None:
    """Return the speed-up divided by the ratio of workers; None if the baseline has the same number of workers."""
    gained, ours = speedup(group, baseline), group.first.workers
    theirs = baseline.first.workers if baseline else None
    return gained * theirs / ours if gained and ours and theirs and ours != theirs else None


def score_text(score: Spread | None) -> str:
    """Return mean and deviation as text."""
    if score is None:
        return UNKNOWN
    return f"{score.mean:.4f}" + (f" ± {score.deviation:.4f}" if score.deviation is not None else "")


def duration(seconds: float) -> str:
    """Return a readable time."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _seconds_text(seconds: float) -> str:
    """Return a short time as text."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _size_text(size: float) -> str:
    """Return a number of bytes as text."""
    return EngFormatter("B")(float(f"{size:.3g}"))


def _recipe_values(group: Group) -> dict[str, Any]:
    first = group.first
    # A training that failed early does not represent the trainings with scores and times in the same row.
    longest = max(group.members, key=lambda facts: (facts.counts, facts.epochs))
    return {
        "batch": first.global_batch_size,
        "workers": first.workers,
        "warm-up": warmup_text(first.run),
        "rate": peak_rate(first.run),
        "optimizer": group.settings.get("optimizer.name"),
        "codec": group.settings.get("exchange.codec.name"),
        "precision": group.settings.get("training.precision"),
        "epochs": longest.epochs,
        "steps": longest.steps,
    }


def _run_row(part: DatasetGroups, group: Group, facts: Facts, metric: str) -> dict[str, Any]:
    run = facts.run
    return {
        "dataset": part.dataset,
        "group": group.number,
        "run_id": run.run_id,
        "name": run.name,
        "source": run.source,
        "started": run.started,
        "status": run.status,
        "trouble": facts.trouble,
        "seed": run.settings.get(SEED),
        "epochs": facts.epochs,
        "steps": facts.steps,
        f"{metric} best": facts.best,
        f"{metric} best epoch": facts.best_epoch,
        f"{metric} last": facts.last,
        "training seconds": facts.seconds,
        "images per second": facts.images_per_second,
        "payload bytes of a rank": facts.payload_bytes,
        **{f"metric {name}": value for name, value in run.metrics.items()},
        **{f"setting {name}": value for name, value in run.settings.items()},
    }


def csv_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as CSV, with a column for each name that any row has."""
    import pandas

    cells = [{name: cell(value) for name, value in row.items()} for row in rows]
    return str(pandas.DataFrame(cells, dtype=object).to_csv(index=False, lineterminator="\n"))


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else form(value)


def _mean(spread: Spread | None) -> float | None:
    return None if spread is None else spread.mean


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
