"""The rules of the search for the largest batch: which sizes to try, and which one fits.

This module imports no TensorFlow, because the driver reads the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from conf.sections.training import TrainingConfig
from pipelines.training.memory.memory import MemoryLimit, Needs

FRACTION = 0.8
"""The fraction of a rank's memory that a batch may take. The rest is for validation, checkpoints and fragmentation."""
MAXIMUM_TRIALS = 6
_ROUND_FROM, _ROUND_TO = 16, 8


@dataclass(frozen=True)
class Trial:
    """A batch size that all ranks have tried."""

    batch_size: int
    peak: int
    """Largest memory of any rank so far, in bytes."""
    out_of_memory: bool = False
    """Whether the accelerator of a rank could not hold the batch."""

    def fits(self, limit: MemoryLimit) -> bool:
        """Return whether the batch left enough memory free."""
        return not self.out_of_memory and self.peak <= FRACTION * limit.bytes


@dataclass(frozen=True)
class BatchSearch:
    """The result of the search."""

    needs: Needs
    limit: MemoryLimit
    """Memory of the rank with the least memory."""
    largest_allowed: int
    """Limit of the batch sizes that were tried."""
    trials: list[Trial]

    @property
    def found(self) -> int | None:
        """The largest batch per worker that was tried and fits; None if none fits."""
        return max((trial.batch_size for trial in self.trials if trial.fits(self.limit)), default=None)


def batch_multiple(config: TrainingConfig) -> int:
    """Return the required divisor of every batch size: 2 with mixup, which mixes samples in pairs; otherwise 1."""
    return 1 if config.mixup is None else 2


def next_batch_size(
    needs: Needs, limit: MemoryLimit, largest_allowed: int, trials: Sequence[Trial], multiple: int = 1
) -> int | None:
    """Return the next batch size to try, larger than all previous ones, because used memory is never returned.

    The first size is 1/32 of the estimated limit. The second size is twice the first, or less if the memory would reach
    the limit assuming that all of it grows with the batch. For later sizes, a line through the two last trials predicts
    which size reaches the limit. The search ends at a size that does not fit, at the largest allowed one, or after
    `MAXIMUM_TRIALS`. It also ends if the next size would be less than a tenth larger. Every size is a multiple of
    `multiple`, as `largest_allowed` is.
    """
    allowed = FRACTION * limit.bytes
    if not trials:
        return max(multiple, min(largest_allowed, _rounded(needs.fitting(allowed) // 32, multiple)))
    last = trials[-1]
    if not last.fits(limit) or len(trials) == MAXIMUM_TRIALS or last.batch_size == largest_allowed:
        return None
    if len(trials) == 1:
        size = min(2 * last.batch_size, int(last.batch_size * allowed / last.peak))
    else:
        before = trials[-2]
        slope = (last.peak - before.peak) / (last.batch_size - before.batch_size)
        # Memory that the process used before its first batch hides small batches. Only the estimate is then known.
        slope = max(slope, needs.sample / 4)
        size = last.batch_size + int((allowed - last.peak) / slope)
    size = min(_rounded(size, multiple), largest_allowed)
    return size if size >= 1.1 * last.batch_size else None


def smaller_batch(config: TrainingConfig, needs: Needs, limit: MemoryLimit | None) -> str:
    """Return a text that says what to change if a batch did not fit.

    Args:
        config: The settings with the batch that did not fit, even if the estimate is smaller.
        needs: The estimate for its model.
        limit: The memory of the rank; None: unknown.
    """
    size, multiple = config.batch_size_per_worker, batch_multiple(config)
    fitting = size // 2 if limit is None else min(size // 2, needs.fitting(FRACTION * limit.bytes))
    fitting = fitting // multiple * multiple
    advice = (
        f"lower it to {fitting}, with training.accumulation_steps or training.global_batch_size for the same global "
        "batch, or let `groundswell find-batch` find the largest that fits"
        if fitting > 0
        else "no smaller batch is estimated to fit: choose a smaller model or more memory"
    )
    return f"training.batch_size_per_worker={size} ({needs.describe()}): {advice}"


def _rounded(size: int, multiple: int) -> int:
    """Round down to a multiple of 8, which kernels prefer, if this changes little; otherwise to one of `multiple`."""
    to = _ROUND_TO if size >= _ROUND_FROM else multiple
    return size // to * to
