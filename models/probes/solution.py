"""What a solver of a linear head gives."""

from dataclasses import dataclass

from models.probes.agreement import Array


@dataclass(frozen=True)
class Solution:
    """A fit for one penalty."""

    weights: Array
    """`(features + 1, classes)`, the same bits on every rank; the last row has the intercepts."""
    objective: float
    """Value that was minimised: the mean loss with the penalty, summed over classes."""
    exchanges: int
    """Sums over ranks that it took."""
    residual: float
    """What the tolerance is for: the largest component of the gradient, or the largest duality gap of a class."""
    converged: bool
    """Whether the residual is within the tolerance."""
    state: Array
    """What a fit for another penalty can start from; may be this rank's own part."""
