"""The facts of one training in a comparison: recipe, score, time and bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from models.schedules import SCALINGS, scaled_learning_rate
from pipelines.comparison.run import EPOCH, PAYLOAD, SCORES, SECONDS, STEP, ComparedRun, best_row

# A training diverged if its last training loss is at least this fraction of that of equal probabilities.
NEAR_CHANCE = 0.98


@dataclass(frozen=True)
class Facts:
    """The facts of one training; a value that is not recorded is None."""

    run: ComparedRun
    workers: int | None
    global_batch_size: int | None
    epochs: int
    """Epochs done."""
    steps: int | None
    """Optimizer steps done."""
    best: float | None
    """Best value of the metric over the epochs."""
    best_epoch: int | None
    """Number of finished epochs at the best value."""
    last: float | None
    """Value of the metric after the last epoch."""
    seconds: float | None
    """Seconds of training, without start, evaluation and interruptions."""
    images_per_second: float | None
    """Training samples per second of all ranks."""
    payload_bytes: float | None
    """Bytes that one rank passed to the collective in all steps."""
    trouble: str
    """Reason why the score does not count for the recipe: diverged, failed or unfinished; empty if it ended well."""

    @property
    def is_diverged(self) -> bool:
        """Whether the training diverged."""
        return self.trouble.startswith("diverged")

    @property
    def counts(self) -> bool:
        """Whether means over seeds include the training."""
        return not self.trouble and self.best is not None

    @property
    def seconds_per_step(self) -> float | None:
        """The seconds of one optimizer step."""
        return self.seconds / self.steps if self.seconds and self.steps else None


def facts_of(run: ComparedRun, metric: str) -> Facts:
    """Return the facts of a training, with the scores of one metric."""
    steps, seconds, epochs = _last(run, STEP), _last(run, SECONDS), _last(run, EPOCH)
    batch, values = number(run.settings.get("global_batch_size")), run.history.get(metric, [])
    best = best_row(values, metric)
    return Facts(
        run=run,
        workers=_whole(run.settings.get("launch.num_workers")),
        global_batch_size=_whole(run.settings.get("global_batch_size")),
        epochs=int(epochs or 0),
        steps=None if steps is None else int(steps),
        best=None if best is None else values[best],
        best_epoch=None if best is None else int(run.history[EPOCH][best] or 0),
        last=values[-1] if values else None,
        seconds=seconds,
        images_per_second=steps * batch / seconds if steps and batch and seconds else None,
        payload_bytes=_last(run, PAYLOAD),
        trouble=_trouble(run),
    )


def chosen_metric(runs: Sequence[ComparedRun], wanted: str | None) -> str:
    """Return the metric that compares trainings.

    Args:
        runs: The trainings.
        wanted: The user's choice; None: the first of `SCORES` that any training has.

    Raises:
        ValueError: No training has the metric.
    """
    known = sorted({name for run in runs for name in run.history} - {EPOCH, STEP, SECONDS, PAYLOAD})
    if wanted is None:
        return next((name for name in SCORES if name in known), "train/loss")
    if wanted not in known:
        raise ValueError(f"--metric {wanted}: no training has it, expected one of {', '.join(known) or 'none'}")
    return wanted


def peak_rate(run: ComparedRun) -> float | None:
    """Return the peak of the learning rate."""
    rate = number(run.settings.get("optimizer.learning_rate"))
    if rate is not None:
        return rate
    per_256 = number(run.settings.get("optimizer.learning_rate_per_256"))
    batch, scaling = _whole(run.settings.get("global_batch_size")), run.settings.get("optimizer.scaling", "linear")
    if per_256 is None or batch is None or per_256 <= 0 or batch <= 0 or scaling not in SCALINGS:
        return None
    return scaled_learning_rate(per_256, batch, scaling)


def warmup_text(run: ComparedRun) -> str:
    """Return a short text for the warm-up, such as `gradual, 5 epochs`."""
    name = run.settings.get("schedule.warmup.name", "not recorded")
    for unit in ("epochs", "steps", "fraction"):
        length = run.settings.get(f"schedule.warmup.{unit}")
        if length is not None:
            shown = number(length)
            text = length if shown is None else f"{shown:g}"
            words = {"fraction": "of the run"}.get(unit, unit if shown != 1 else unit.removesuffix("s"))
            return f"{name}, {text} {words}"
    return name


def number(text: str | None) -> float | None:
    """Return the number in a setting's text; None if the text is not a number."""
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _trouble(run: ComparedRun) -> str:
    if run.is_diverged:
        return f"diverged: {run.diverged}"
    losses, chance = run.history.get("train/loss", []), run.chance_loss
    if losses and losses[-1] is None:
        return "diverged: the last training loss is not finite"
    if chance is not None and len(losses) > 1 and (losses[-1] or 0.0) >= NEAR_CHANCE * chance:
        return f"diverged: the last training loss is at chance level, {losses[-1]:.4g} of {chance:.4g}"
    return "" if run.status == "FINISHED" else run.status.lower()


def _last(run: ComparedRun, column: str) -> float | None:
    values = run.history.get(column, [])
    return values[-1] if values else None


def _whole(text: str | None) -> int | None:
    value = number(text)
    return None if value is None else int(value)
