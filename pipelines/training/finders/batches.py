"""Which batch sizes to try, and which one fits: the search for the largest batch as numbers.

Nothing here imports TensorFlow: the driver reads the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from conf.sections.training import TrainingConfig
from pipelines.training.memory.memory import MemoryLimit, Needs

FRACTION = 0.8
"""Part of a rank's memory that a batch may take: the rest is for validation, checkpoints and fragmentation."""
MAXIMUM_TRIALS = 6
_FIRST_PART = 32
_ROUND_FROM, _ROUND_TO = 16, 8


@dataclass(frozen=True)
class Trial:
    """One batch size that all ranks have tried."""

    batch_size: int
    peak: int
    """Largest memory of a rank so far, in bytes: the maximum over the ranks."""
    out_of_memory: bool = False
    """Whether the accelerator of a rank could not hold the batch."""

    def fits(self, limit: MemoryLimit) -> bool:
        """Whether the batch left the memory free that it must."""
        return not self.out_of_memory and self.peak <= FRACTION * limit.bytes


@dataclass(frozen=True)
class BatchSearch:
    """What the search has seen."""

    needs: Needs
    limit: MemoryLimit
    """Memory of the rank that has the least."""
    largest_allowed: int
    """No larger batch was tried."""
    trials: list[Trial]

    @property
    def found(self) -> int | None:
        """Largest batch per worker that was tried and fits; None if none does."""
        return max((trial.batch_size for trial in self.trials if trial.fits(self.limit)), default=None)


def batch_multiple(config: TrainingConfig) -> int:
    """Return the number of which every batch size must be a multiple: mixup takes samples in pairs."""
    return 1 if config.mixup is None else 2


def next_batch_size(
    needs: Needs, limit: MemoryLimit, largest_allowed: int, trials: Sequence[Trial], multiple: int = 1
) -> int | None:
    """Return the batch size to try next, larger than all before: memory that was held once is not given back.

    The first is a thirty-second of what the estimate allows. The second is twice that, or less where the memory would
    reach the limit if all of it grew with the batch. From then on a line through the two last trials says which size
    reaches the limit. The search ends at a size that does not fit, at the largest allowed one, after `MAXIMUM_TRIALS`,
    and where less than a tenth more is allowed. Every size is a multiple of `multiple`, as `largest_allowed` is.
    """
    allowed = FRACTION * limit.bytes
    if not trials:
        return max(multiple, min(largest_allowed, _rounded(needs.fitting(allowed) // _FIRST_PART, multiple)))
    last = trials[-1]
    if not last.fits(limit) or len(trials) == MAXIMUM_TRIALS or last.batch_size == largest_allowed:
        return None
    if len(trials) == 1:
        size = min(2 * last.batch_size, int(last.batch_size * allowed / last.peak))
    else:
        before = trials[-2]
        slope = (last.peak - before.peak) / (last.batch_size - before.batch_size)
        # What the process held before its first batch hides small ones: then nothing is known but the estimate.
        slope = max(slope, needs.sample / 4)
        size = last.batch_size + int((allowed - last.peak) / slope)
    size = min(_rounded(size, multiple), largest_allowed)
    return size if size >= 1.1 * last.batch_size else None


def smaller_batch(config: TrainingConfig, needs: Needs, limit: MemoryLimit | None) -> str:
    """Say what to change where a batch did not fit.

    Args:
        config: It has the batch that did not fit, whatever the estimate says.
        needs: The estimate for its model.
        limit: The memory of the rank; None: not known.
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
    """Round down to a multiple of 8, which kernels prefer, where that changes little; else to one of `multiple`."""
    to = _ROUND_TO if size >= _ROUND_FROM else multiple
    return size // to * to
