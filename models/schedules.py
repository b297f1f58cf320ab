"""Learning rates as pure functions of the step, counted from 0."""

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]

SCALINGS = ("linear", "sqrt")


def scaled_learning_rate(rate_per_256: float, global_batch_size: int, scaling: str) -> float:
    """Scale a rate for 256 images per step: with k = global_batch_size / 256, return rate * k or rate * sqrt(k).

    Raises:
        ValueError: a rate or batch size that is not positive, or an unknown scaling.

    Source: Goyal et al. 2017, section 2.1 (linear); Krizhevsky 2014, section 5 (square root).
    """
    _check_positive("rate_per_256", rate_per_256)
    _check_positive("global_batch_size", global_batch_size)
    if scaling not in SCALINGS:
        raise ValueError(f"scaling must be one of {SCALINGS}, got {scaling!r}")
    ratio = global_batch_size / 256
    return rate_per_256 * (ratio if scaling == "linear" else math.sqrt(ratio))


def step_at(fraction: float, total_steps: int) -> int:
    """Return the first step that is at or after a part of the run, in [0, total_steps].

    Raises:
        ValueError: a fraction outside [0, 1], or a number of steps that is not positive.
    """
    _check_positive("total_steps", total_steps)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}")
    # 0.55 * 100 is 55.00000000000001 in floating point: without the tolerance this boundary would be step 56.
    return math.ceil(fraction * total_steps - 1e-6)


def constant(peak: float) -> Schedule:
    """Return the peak for every step.

    Raises:
        ValueError: a peak that is not positive.
    """
    _check_positive("peak", peak)
    return lambda step: peak


def multi_step(peak: float, milestones: Sequence[tuple[int, float]]) -> Schedule:
    """Return the peak times the factor of the last passed milestone.

    A milestone `(first_step, factor)` holds from this step on. Factors multiply the peak, not each other. Of two
    milestones at the same step, as in very short runs, the second one holds.

    Raises:
        ValueError: a peak or factor that is not positive, or steps that fall.

    Source: Goyal et al. 2017, section 5.1: a tenth at 30, 60 and 80 of 90 epochs.
    """
    _check_positive("peak", peak)
    steps = [first_step for first_step, _ in milestones]
    if steps != sorted(steps) or any(step < 0 for step in steps):
        raise ValueError(f"milestones must not fall, from step 0, got {steps}")
    for _, factor in milestones:
        _check_positive("milestone factor", factor)

    def rate(step: int) -> float:
        factors = [1.0, *(factor for first_step, factor in milestones if step >= first_step)]
        return peak * factors[-1]

    return rate


def polynomial(peak: float, *, start_step: int, end_step: int, power: float, end_rate: float) -> Schedule:
    """Return a rate that falls from the peak as a power of the remaining part of an interval of steps.

        rate(s) = end_rate + (peak - end_rate) * (1 - t)^power,  t = (s - start_step) / (end_step - start_step)

    Before `start_step` the rate is the peak, and from `end_step` on the end rate.

    Raises:
        ValueError: a peak or power that is not positive, an end rate below 0 or above the peak, or an interval that
            does not rise.

    Source: MLPerf training, reference of ResNet-50 with LARS, with power 2 and end rate 1e-4.
    """
    _check_positive("power", power)
    return _falling(peak, start_step, end_step, end_rate, lambda t: (1 - t) ** power)


def cosine(peak: float, *, start_step: int, end_step: int, end_rate: float) -> Schedule:
    """Return a rate that falls from the peak along half a period of a cosine.

        rate(s) = end_rate + (peak - end_rate) * (1 + cos(pi * t)) / 2,  t = (s - start_step) / (end_step - start_step)

    Before `start_step` the rate is the peak, and from `end_step` on the end rate.

    Raises:
        ValueError: as `polynomial`.

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.
    """
    return _falling(peak, start_step, end_step, end_rate, lambda t: (1 + math.cos(math.pi * t)) / 2)


def constant_warmup(schedule: Schedule, warmup_steps: int, factor: float) -> Schedule:
    """Return a schedule that is a constant part of the given one in the first steps.

    Raises:
        ValueError: a negative number of steps, or a factor that is not positive.

    Source: Goyal et al. 2017, section 2.2, which takes it from He et al. 2016.
    """
    _check_not_negative("warmup_steps", warmup_steps)
    _check_positive("factor", factor)
    return lambda step: schedule(step) * (factor if step < warmup_steps else 1.0)


def gradual_warmup(schedule: Schedule, warmup_steps: int, start_rate: float = 0.0) -> Schedule:
    """Return a schedule that rises to the given one in the first steps.

        rate(s) = start_rate + (schedule(s) - start_rate) * (s + 1) / warmup_steps for s < warmup_steps
        rate(s) = schedule(s) afterwards

    0 steps mean no warm-up.

    Raises:
        ValueError: a negative number of steps, or a negative rate.

    Source: Goyal et al. 2017, section 2.2, where `start_rate` is the rate for 256 images; MLPerf's begins at 0.
    Differs: the last step of the warm-up has the full rate, and the first one is a part above `start_rate`.
    """
    _check_not_negative("warmup_steps", warmup_steps)
    _check_not_negative("start_rate", start_rate)

    def rate(step: int) -> float:
        full = schedule(step)
        return full if step >= warmup_steps else start_rate + (full - start_rate) * (step + 1) / warmup_steps

    return rate


def _falling(peak: float, start_step: int, end_step: int, end_rate: float, shape: Callable[[float], float]) -> Schedule:
    _check_positive("peak", peak)
    if not 0 <= end_rate <= peak:
        raise ValueError(f"end_rate must be in [0, peak], got end_rate {end_rate} and peak {peak}")
    if not 0 <= start_step <= end_step:
        raise ValueError(f"start_step and end_step must rise from 0, got {start_step} and {end_step}")

    def rate(step: int) -> float:
        if step < start_step:
            return peak
        if step >= end_step:
            return end_rate
        return end_rate + (peak - end_rate) * shape((step - start_step) / (end_step - start_step))

    return rate


def _check_not_negative(name: str, value: float) -> None:
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def _check_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
