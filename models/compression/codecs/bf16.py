"""Brain floats: 2 bytes per element, with the range of float32."""

import tensorflow as tf

from models.compression.codec import Codec
from models.compression.codecs.fp16 import RoundingQuantiser
from models.compression.schemes.memory import ErrorFeedback, NoMemory
from models.compression.schemes.scatter_gather import ScatterGather


def bf16(*, prescale: float, error_feedback: bool) -> Codec:
    """Round to the nearest brain float, with a relative error up to 2**-8.

    The numbers are sent as bytes and summed in float32, because no operation of Horovod accepts brain floats.

    Args:
        prescale: Multiplies before the rounding and is divided out after it. Only gradients beyond float32's own
            normal range (1e-38 to 3e38) need one.
        error_feedback: Whether what the rounding lost is added to the next gradient.

    Raises:
        ValueError: a prescale that is not positive.
    """
    if prescale <= 0:
        raise ValueError(f"prescale must be positive, got {prescale}")
    return ScatterGather(
        "bf16",
        RoundingQuantiser(tf.bfloat16, prescale),
        ErrorFeedback() if error_feedback else NoMemory(),
        owner_feedback=error_feedback,
    )
