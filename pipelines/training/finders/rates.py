"""The figures of the learning-rate range test: increasing rates, smoothed losses, and the suggested rate.

This module imports no TensorFlow, because the driver reads the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_DECAY = 0.9
_DIVERGED_FACTOR = 4.0
_LEAST_POINTS = 5
"""The number of points that a slope needs, and after which the smoothing no longer depends on its first loss."""
RULE = (
    "the rate at which the smoothed loss falls most steeply, at most a tenth of the rate with the lowest smoothed loss"
)


@dataclass(frozen=True)
class RatePoint:
    """One optimizer step of the test."""

    rate: float
    """Learning rate of the step."""
    loss: float
    """Mean loss of the global batch before the step's update. It may not be finite."""
    smoothed: float
    """Mean of the losses so far. Each loss has 0.9 of the weight of the next one."""


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test."""

    points: list[RatePoint]
    diverged: bool
    """Whether the test ended because the loss diverged, and not at the highest rate."""


@dataclass(frozen=True)
class Suggestion:
    """A suggested learning rate, and the two figures that it is computed from."""

    rate: float
    steepest: float
    """Rate at which the smoothed loss decreases fastest over the logarithm of the rate."""
    lowest: float
    """Rate with the lowest smoothed loss."""


def rising_rates(low: float, high: float, steps: int) -> list[float]:
    """Return `low * (high / low)**(i / (steps - 1))` for every step i.

    Raises:
        ValueError: The rates do not rise from above 0, or there are fewer than 10 steps.
    """
    if not 0 < low < high:
        raise ValueError(f"the rates must rise from above 0, got {low:g} to {high:g}: change --low or --high")
    if steps < 2 * _LEAST_POINTS:
        raise ValueError(f"a range test needs at least {2 * _LEAST_POINTS} steps, got --steps {steps}")
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


class SmoothedLosses:
    """Smooths the losses of a range test, and decides when it must end.

        smoothed_i = sum over j <= i of 0.9**(i - j) * loss_j, divided by the sum of these weights
        diverged:   the loss is not finite, or smoothed_i > 4 * lowest, the lowest smoothed value before it; where
                    that is not above 0: smoothed_i > lowest + 3 * max(-lowest, highest - lowest)

    Source: Smith 2017, section 3.3, for the test; smoothing and limit are those of common practice.
    """

    def __init__(self) -> None:
        """Start without losses."""
        self._sum = 0.0
        self._weight = 0.0
        self._lowest = math.inf
        self._highest = -math.inf
        self.points: list[RatePoint] = []

    def add(self, rate: float, loss: float) -> bool:
        """Add the loss of a step with this rate and return whether it diverged."""
        self._sum = _DECAY * self._sum + loss
        self._weight = _DECAY * self._weight + 1.0
        smoothed = self._sum / self._weight
        self.points.append(RatePoint(rate, loss, smoothed))
        if not math.isfinite(smoothed) or smoothed > self._limit:
            return True
        self._lowest, self._highest = min(self._lowest, smoothed), max(self._highest, smoothed)
        return False

    @property
    def _limit(self) -> float:
        """The limit of the smoothed loss; above it training has diverged."""
        scale = self._lowest if self._lowest > 0 else max(-self._lowest, self._highest - self._lowest)
        return self._lowest + (_DIVERGED_FACTOR - 1) * scale


def suggest(points: Sequence[RatePoint]) -> Suggestion | None:
    """Return the learning rate that the `RULE` suggests; None if the smoothed loss never decreases.

    The slope at a point is that of the line between its two neighbours. The first points are left out because they are
    smoothed over few losses.
    """
    known = [point for point in points if math.isfinite(point.smoothed)][_LEAST_POINTS:]
    if len(known) < 3:
        return None
    lowest = min(range(len(known)), key=lambda index: known[index].smoothed)
    slopes = {
        index: (known[index + 1].smoothed - known[index - 1].smoothed)
        / math.log(known[index + 1].rate / known[index - 1].rate)
        for index in range(1, min(lowest, len(known) - 2) + 1)
    }
    if not slopes or min(slopes.values()) >= 0:
        return None
    steepest = known[min(slopes, key=lambda index: slopes[index])].rate
    return Suggestion(min(steepest, known[lowest].rate / 10), steepest, known[lowest].rate)
