"""Which batch sizes to try, and which one fits: the search for the largest batch as numbers.

Nothing here imports TensorFlow: the driver reads the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.training.finders.memory import MemoryLimit, Needs

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
    """That of the rank with the least."""
    largest_allowed: int
    """No larger batch was tried."""
    trials: list[Trial]

    @property
    def found(self) -> int | None:
        """Largest batch per worker that was tried and fits; None if none does."""
        return max((trial.batch_size for trial in self.trials if trial.fits(self.limit)), default=None)


def next_batch_size(needs: Needs, limit: MemoryLimit, largest_allowed: int, trials: Sequence[Trial]) -> int | None:
    """Return the batch size to try next, larger than all before: memory that was held once is not given back.

    The first is a thirty-second of what the estimate allows. The second is twice that, or less where the memory would
    reach the limit if all of it grew with the batch. From then on a line through the two last trials says which size
    reaches the limit. The search ends at a size that does not fit, at the largest allowed one, after `MAXIMUM_TRIALS`,
    and where less than a tenth more is allowed.
    """
    allowed = FRACTION * limit.bytes
    if not trials:
        return max(1, min(largest_allowed, _rounded(needs.fitting(allowed) // _FIRST_PART)))
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
    size = min(_rounded(size), largest_allowed)
    return size if size >= 1.1 * last.batch_size else None


def _rounded(size: int) -> int:
    """Round down to a multiple of 8, which kernels prefer, where that changes little."""
    return size // _ROUND_TO * _ROUND_TO if size >= _ROUND_FROM else size
