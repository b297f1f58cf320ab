"""The result of a solver of a linear head."""

from dataclasses import dataclass

from models.probes.agreement import Array


@dataclass(frozen=True)
class Solution:
    """A fit for one penalty."""

    weights: Array
    """`(features + 1, classes)`, the same bits on every rank; the last row has the intercepts."""
    objective: float
    """Minimised value: the mean loss with the penalty, summed over classes."""
    exchanges: int
    """Number of sums over ranks."""
    residual: float
    """Value that the tolerance bounds: the largest component of the gradient, or the largest duality gap of a class."""
    converged: bool
    """Whether the residual is within the tolerance."""
    state: Array
    """Start for a fit with another penalty; it may be this rank's own part."""
