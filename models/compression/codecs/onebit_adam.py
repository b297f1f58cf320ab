"""1-bit Adam: the exchange's half of a pair; the other is `models.optimizers.onebit_adam`."""

from models.compression.codec import Codec
from models.compression.codecs.scaled_sign import ScaledSign
from models.compression.schemes.memory import SharedMomentum
from models.compression.schemes.scatter_gather import ScatterGather


def onebit_adam(*, beta_1: float = 0.9) -> Codec:
    """Exchange Adam's first moment in one bit an element instead of the gradient.

    During the exchange's dense warm-up the mean gradient comes out, and the optimizer is Adam; after it, the first
    moment, over a second moment that the optimizer has frozen. Tensors that stay dense are averaged exactly.

    Args:
        beta_1: That of the optimizer.

    Raises:
        ValueError: a beta out of range.

    Source: Tang et al. 2021, "1-bit Adam", algorithm 1.
    """
    if not 0 <= beta_1 < 1:
        raise ValueError(f"beta_1 must be in [0, 1), got {beta_1}")
    return ScatterGather("onebit_adam", ScaledSign(), SharedMomentum(beta_1), owner_feedback=True)
