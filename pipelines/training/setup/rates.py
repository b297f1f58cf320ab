"""The configured learning rate by step; this module imports no TensorFlow because the driver uses it too."""

from collections.abc import Sequence

from conf.schema import RunConfig
from conf.sections.optimizers import OptimizerConfig
from conf.sections.schedules import (
    Boundary,
    ConstantWarmupConfig,
    CosineConfig,
    DecayConfig,
    GradualWarmupConfig,
    MultiStepConfig,
    PolynomialConfig,
    ScheduleConfig,
    check_rising,
)
from models.schedules import (
    Schedule,
    constant,
    constant_warmup,
    cosine,
    gradual_warmup,
    multi_step,
    polynomial,
    scaled_learning_rate,
    step_at,
)


def peak_learning_rate(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    """Return the learning rate after warm-up and before decay."""
    if optimizer.learning_rate is not None:
        return optimizer.learning_rate
    assert optimizer.learning_rate_per_256 is not None
    return scaled_learning_rate(optimizer.learning_rate_per_256, global_batch_size, optimizer.scaling)


def make_schedule(config: RunConfig, steps_per_epoch: int) -> Schedule:
    """Return the learning rate by optimizer step, from step 0.

    Args:
        config: The configuration: `optimizer` has the peak, `schedule` the shape, and `training.epochs` the length.
        steps_per_epoch: Number of optimizer steps per epoch.

    Raises:
        ValueError: A boundary of the schedule is beyond the end of the run, or before its predecessor. Or the rate at
            the start of the warm-up, or at the end, is above the peak.
    """
    peak = peak_learning_rate(config.optimizer, config.global_batch_size)
    steps = boundary_steps(config.schedule, config.training.epochs, steps_per_epoch)
    warmup = config.schedule.warmup
    warmup_steps = steps[0][1] if isinstance(warmup, Boundary) else 0
    decay_steps = [step for name, step in steps if name.startswith("schedule.decay")]
    schedule = _decay(config.schedule.decay, peak, warmup_steps, decay_steps)
    if isinstance(warmup, ConstantWarmupConfig):
        return constant_warmup(schedule, warmup_steps, warmup.factor)
    if isinstance(warmup, GradualWarmupConfig):
        base = config.optimizer.learning_rate_per_256
        return gradual_warmup(schedule, warmup_steps, _start_rate(warmup, base, peak, config.global_batch_size))
    return schedule


def boundary_steps(schedule: ScheduleConfig, epochs: int, steps_per_epoch: int) -> list[tuple[str, int]]:
    """Return every boundary of the schedule with its key, as the first step at or after it.

    Args:
        schedule: The schedule's section.
        epochs: Number of epochs of the run.
        steps_per_epoch: Number of optimizer steps per epoch.

    Raises:
        ValueError: See `make_schedule`.
    """
    return place_steps(schedule.places(), schedule.recipe_epochs, epochs, steps_per_epoch)


def place_steps(
    places: Sequence[tuple[str, Boundary]], recipe_epochs: float | None, epochs: int, steps_per_epoch: int
) -> list[tuple[str, int]]:
    """Return boundaries of a run with their keys, each as the first step at or after it.

    Args:
        places: The boundaries with their keys.
        recipe_epochs: Length of the run for which they state epochs; None: that of this run.
        epochs: Number of epochs of this run.
        steps_per_epoch: Number of optimizer steps per epoch.

    Raises:
        ValueError: A boundary is beyond the end of the run, or before its predecessor.
    """
    total_steps = epochs * steps_per_epoch
    steps = [(name, _step(place, recipe_epochs or epochs, total_steps)) for name, place in places]
    check_rising(steps, total_steps, unit="step", end_text=f"{total_steps} steps")
    return steps


def _step(place: Boundary, recipe_epochs: float, total_steps: int) -> int:
    if place.steps is not None:
        return place.steps
    epoch = place.in_epochs(recipe_epochs)
    assert epoch is not None
    return step_at(min(1.0, epoch / recipe_epochs), total_steps)


def _decay(config: DecayConfig, peak: float, warmup_steps: int, steps: list[int]) -> Schedule:
    if isinstance(config, MultiStepConfig):
        return multi_step(peak, list(zip(steps, [milestone.factor for milestone in config.milestones], strict=True)))
    if not isinstance(config, PolynomialConfig | CosineConfig):
        return constant(peak)
    if config.end_rate > peak:
        raise ValueError(f"schedule.decay.end_rate={config.end_rate} is above the peak learning rate, {peak:g}")
    (end_step,) = steps
    if isinstance(config, CosineConfig):
        return cosine(peak, start_step=warmup_steps, end_step=end_step, end_rate=config.end_rate)
    return polynomial(peak, start_step=warmup_steps, end_step=end_step, power=config.power, end_rate=config.end_rate)


def _start_rate(warmup: GradualWarmupConfig, base: float | None, peak: float, global_batch_size: int) -> float:
    if warmup.start != "base":
        return 0.0
    assert base is not None, "the configuration has checked it"
    if base > peak:
        raise ValueError(
            f"schedule.warmup.start=base begins with {base:g}, the rate for a global batch of 256, which is above the "
            f"peak for {global_batch_size}, {peak:g}: set schedule.warmup.start=zero, or a larger global batch"
        )
    return base
