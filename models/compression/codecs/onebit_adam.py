"""1-bit Adam: the codec of a pair; its optimizer is `models.optimizers.onebit_adam`."""

from typing import Literal

from models.compression.codec import Codec
from models.compression.codecs.scaled_sign import ScaledSignQuantiser
from models.compression.schemes.memory import SharedMomentum
from models.compression.schemes.scatter_gather import ScatterGather


def onebit_adam(*, beta_1: float, scale: Literal["mean", "norm"]) -> Codec:
    """Exchange Adam's first moment in one bit per element, instead of the gradient.

    While the exchange warms up, the result is the mean gradient and the optimizer is Adam. Afterwards the result is the
    first moment, and the optimizer divides it by its frozen second moment. Dense tensors are averaged exactly.

    Args:
        beta_1: The same as the optimizer's, in [0, 1).
        scale: The same as in `ScaledSignQuantiser`; "norm" is that of DeepSpeed's implementation.

    Raises:
        ValueError: a beta out of range.

    Source: Tang et al. 2021, "1-bit Adam", algorithm 1.
    Differs: the scale "mean" leaves a smaller residual per step than DeepSpeed's; with both, error feedback sends the
    residual later. Each rank's part of a tensor has its own scale.
    """
    if not 0 <= beta_1 < 1:
        raise ValueError(f"beta_1 must be in [0, 1), got {beta_1}")
    return ScatterGather("onebit_adam", ScaledSignQuantiser(scale), SharedMomentum(beta_1), owner_feedback=True)
