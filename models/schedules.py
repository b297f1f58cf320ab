"""Learning rates as pure functions of the step, counted from 0."""

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]

SCALINGS = ("linear", "sqrt")
_REFERENCE_BATCH_SIZE = 256


def scaled_learning_rate(rate_per_256: float, global_batch_size: int, scaling: str) -> float:
    """Scale a rate for 256 images per step: with k = global_batch_size / 256, return rate * k or rate * sqrt(k).

    Raises:
        ValueError: a rate or batch size that is not positive, or an unknown scaling.

    Source: Goyal et al. 2017, section 2.1 (linear); Krizhevsky 2014, section 5 (square root).
    """
    if rate_per_256 <= 0:
        raise ValueError(f"rate_per_256 must be positive, got {rate_per_256}")
    if global_batch_size <= 0:
        raise ValueError(f"global_batch_size must be positive, got {global_batch_size}")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling must be one of {SCALINGS}, got {scaling!r}")
    ratio = global_batch_size / _REFERENCE_BATCH_SIZE
    return rate_per_256 * (ratio if scaling == "linear" else math.sqrt(ratio))


def multi_step(peak: float, total_steps: int, milestones: Sequence[tuple[float, float]]) -> Schedule:
    """Return the peak times the factor of the last milestone that was passed.

    A milestone `(fraction, factor)` holds from the first step >= fraction * total_steps. Factors multiply the peak, not
    each other.

    Raises:
        ValueError: a peak, number of steps or factor that is not positive, or fractions that do not rise within [0, 1].

    Source: Goyal et al. 2017, section 5.1: a tenth at 30, 60 and 80 of 90 epochs.
    """
    _check_positive("peak", peak)
    _check_positive("total_steps", total_steps)
    fractions = [fraction for fraction, _ in milestones]
    if fractions != sorted(set(fractions)) or any(not 0 <= fraction <= 1 for fraction in fractions):
        raise ValueError(f"milestone fractions must rise within [0, 1], got {fractions}")
    for _, factor in milestones:
        _check_positive("milestone factor", factor)
    # 0.55 * 100 is 55.00000000000001 in floating point: without the tolerance that boundary would be step 56.
    boundaries = [(math.ceil(fraction * total_steps - 1e-6), factor) for fraction, factor in milestones]

    def rate(step: int) -> float:
        factor = 1.0
        for first_step, milestone_factor in boundaries:
            if step >= first_step:
                factor = milestone_factor
        return peak * factor

    return rate


def gradual_warmup(schedule: Schedule, warmup_steps: int) -> Schedule:
    """Return a schedule that rises over the first steps to the given one.

        rate(s) = schedule(s) * (s + 1) / warmup_steps for s < warmup_steps,  schedule(s) afterwards

    0 steps mean no warm-up.

    Raises:
        ValueError: a negative number of steps.

    Source: Goyal et al. 2017, section 2.2.
    Differs: in the source the rate rises from that of one worker to that of all workers. Here the first rate is
    peak / warmup_steps for any number of workers, so that the same global batch trains alike on any number of them.
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
    if warmup_steps == 0:
        return schedule
    return lambda step: schedule(step) * min(1.0, (step + 1) / warmup_steps)


def _check_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
