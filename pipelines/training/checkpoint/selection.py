"""The best epoch by a validation metric, and the end of a training that finds no better epoch.

Everything is computed from the history, which every checkpoint contains. A resumed run therefore counts exactly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.sections.training import SelectionConfig
from pipelines.tracking.metrics import is_lower_better

History = Sequence[Mapping[str, float]]
"""Metrics of each epoch done."""


@dataclass(frozen=True)
class Best:
    """The best epoch so far."""

    epoch: int
    """Number of the epoch, from 1."""
    value: float


def best_of(history: History, config: SelectionConfig) -> Best | None:
    """Return the best epoch; None if no epoch has the metric.

        loss:   better if value < best - min_delta
        score:  better if value > best + min_delta

    A value that is not a number is never better.

    Source: the rule of Keras's `EarlyStopping`.
    """
    best, sign = None, -1 if is_lower_better(str(config.metric)) else 1
    for epoch, metrics in enumerate(history, start=1):
        value = metrics.get(config.metric or "", math.nan)
        if not math.isnan(value) and (best is None or sign * (value - best.value) > config.min_delta):
            best = Best(epoch, value)
    return best


def best_step(history: History, config: SelectionConfig, steps_per_epoch: int) -> int | None:
    """Return the number of optimizer steps at the end of the best epoch; None if no epoch is the best."""
    best = best_of(history, config)
    return None if best is None else best.epoch * steps_per_epoch


def is_over(history: History, config: SelectionConfig) -> bool:
    """Return whether as many epochs as `patience` have passed since the best one.

    If a run is resumed with a new metric, epochs without this metric do not count.
    """
    if config.metric is None or config.patience is None:
        return False
    best = best_of(history, config)
    since_best = len(history) - best.epoch if best else sum(config.metric in metrics for metrics in history)
    return since_best >= config.patience


def why_ended(history: History, config: SelectionConfig, epochs: int) -> str:
    """Return why training ended after the epochs in the history; `epochs` is the requested number."""
    if is_over(history, config):
        return f"after {len(history)} of {epochs} epochs: {config.patience} in a row without a better {config.metric}"
    return f"after all {epochs} epochs"


def described(history: History, config: SelectionConfig, epochs: int) -> dict[str, str]:
    """Return the tags of a run whose epochs are compared: why it ended, its best epoch and value."""
    if config.metric is None:
        return {}
    best = best_of(history, config)
    tags = {"training_ended": why_ended(history, config, epochs), "best_metric": config.metric}
    return tags | ({} if best is None else {"best_epoch": str(best.epoch), "best_value": f"{best.value:.6g}"})
