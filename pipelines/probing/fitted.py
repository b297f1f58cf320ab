"""The fitted head of a probe, for the driver: this module imports no TensorFlow."""

from dataclasses import dataclass

from models.probes.head import LinearHead


@dataclass(frozen=True)
class FittedPenalty:
    """The result of one penalty."""

    l2: float
    score: float
    """Metric on the validation split that compares penalties; NaN without such a split."""
    objective: float
    exchanges: int
    """Number of sums over ranks during the fit."""
    residual: float
    """Value that the solver compares with its tolerance."""
    converged: bool


@dataclass(frozen=True)
class FittedHead:
    """The head of the chosen penalty, the same on every rank."""

    head: LinearHead
    chosen: FittedPenalty
    tried: tuple[FittedPenalty, ...]
    """All penalties, the largest first."""
    metric: str
    """Name of the metric that compares penalties on the validation split."""
