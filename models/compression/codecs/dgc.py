"""Deep Gradient Compression: gradient dropping that keeps momentum."""

from collections.abc import Sequence

from models.compression.codec import Codec
from models.compression.codecs.topk import Largest, density_stages, owner_stages
from models.compression.schemes.memory import MomentumCorrection
from models.compression.schemes.scatter_gather import ScatterGather

PUBLISHED_WARMUP = (0.25, 0.0625, 0.015625, 0.004)


def dgc(
    *,
    density: float = 0.001,
    stages: Sequence[tuple[int, float]] = (),
    owner_factor: float = 2.0,
    momentum: float = 0.9,
    nesterov: bool = True,
    masking: bool = True,
    clip_norm: float | None = None,
) -> Codec:
    """The largest elements of accumulated velocities; see `MomentumCorrection`.

    The optimizer must have no momentum: what comes out already has it. Tensors that travel dense get it after the sum.

    Args:
        density: Part of all elements that is sent, in (0, 1].
        stages: `(before_step, density)` for the first steps; published: an epoch each of `PUBLISHED_WARMUP`.
        owner_factor: See `topk`.
        momentum: In [0, 1).
        nesterov: Whether to look one momentum step ahead.
        masking: Stop the momentum of elements that were just sent.
        clip_norm: Each rank clips its gradients, before anything is accumulated, to a global norm of this over the
            square root of the number of ranks.

    Raises:
        ValueError: a value out of range.

    Source: Lin et al. 2018, "Deep Gradient Compression", algorithm 1 and section 3.
    Differs: the exact largest elements of each rank's part of a tensor, instead of a threshold from a sample;
    owners select again, with a residual of their own, so that the traffic does not grow with the number of ranks.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm}")
    return ScatterGather(
        "dgc",
        Largest(density_stages(density, stages)),
        MomentumCorrection(momentum, nesterov=nesterov, masking=masking),
        owner_quantiser=Largest(owner_stages(density, stages, owner_factor)),
        owner_feedback=True,
        local_clip_norm=clip_norm,
    )
