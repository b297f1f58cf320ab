"""Deep Gradient Compression: gradient dropping that keeps momentum."""

from collections.abc import Sequence

from models.compression.codec import Codec
from models.compression.codecs.topk import TopKSparsifier, owner_sparsifier
from models.compression.schemes.memory import MomentumCorrection
from models.compression.schemes.piecewise import density_by_step
from models.compression.schemes.scatter_gather import ScatterGather


def dgc(
    *,
    density: float,
    density_schedule: Sequence[tuple[int, float]],
    owner_factor: float,
    momentum: float,
    nesterov: bool,
    masking: bool,
    clip_norm: float | None,
) -> Codec:
    """Send the largest elements of accumulated velocities; see `MomentumCorrection`.

    The optimizer must have no momentum, because the result already has it. Tensors that are dense get their momentum
    after the sum.

    Args:
        density: Part of all elements that is sent, in (0, 1].
        density_schedule: Pairs `(before_step, density)` for the first steps. Published: one epoch each of 0.25,
            0.0625, 0.015625 and 0.004.
        owner_factor: The same as in `topk`.
        momentum: Decay of the velocities, in [0, 1).
        nesterov: Whether to look one momentum step ahead.
        masking: Whether the momentum of an element stops when the element is sent.
        clip_norm: Before the accumulation, each rank clips its gradients to this global norm, divided by the square
            root of the number of ranks; None: no clipping.

    Raises:
        ValueError: a value out of range.

    Source: Lin et al. 2018, "Deep Gradient Compression", algorithm 1 and section 3.
    Differs: the exact largest elements of each rank's part of a tensor, instead of a threshold from a sample. Owners
    select again, with their own residual, so that the traffic does not grow with the number of ranks.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm}")
    densities = density_by_step(density, density_schedule)
    return ScatterGather(
        "dgc",
        TopKSparsifier(densities),
        MomentumCorrection(momentum, nesterov=nesterov, masking=masking),
        owner_compressor=owner_sparsifier(densities, owner_factor),
        owner_feedback=True,
        local_clip_norm=clip_norm,
    )
