"""The check that an optimizer fits the codec of an exchange."""

import keras

from models.compression.codec import Codec
from models.optimizers.lars import LARS
from models.optimizers.onebit_adam import OneBitAdam


def check_optimizer(codec: Codec, optimizer: keras.optimizers.Optimizer, *, warmup_steps: int) -> None:
    """Refuse a pair that would apply momentum twice, or never.

    Args:
        codec: The codec of the exchange.
        optimizer: The optimizer that applies the results of the exchange.
        warmup_steps: Number of first steps in which the exchange sends everything dense.

    Raises:
        ValueError: codec and optimizer do not fit; the message says why.
    """
    kind = type(optimizer).__name__
    momentum = getattr(optimizer, "momentum", 0.0)
    if codec.name == "dgc" and (isinstance(optimizer, LARS) or hasattr(optimizer, "beta_1")):
        raise ValueError(f"the codec 'dgc' gives accumulated velocities, for which {kind} has no known recipe: use SGD")
    if codec.name == "dgc" and momentum > 0:
        raise ValueError(
            f"the codec 'dgc' has its own momentum, and {kind} would apply a second one of {momentum}: set it to 0"
        )
    is_pair = isinstance(optimizer, OneBitAdam)
    if (codec.name == "onebit_adam") != is_pair:
        raise ValueError(
            f"the codec 'onebit_adam' and the optimizer OneBitAdam are two halves of one method, got codec "
            f"{codec.name!r} and {kind}: one without the other would apply the first moment twice or never"
        )
    if is_pair and optimizer.warmup_steps != warmup_steps:
        raise ValueError(
            f"OneBitAdam and its exchange must warm up for as many steps, got {optimizer.warmup_steps} and "
            f"{warmup_steps}"
        )
