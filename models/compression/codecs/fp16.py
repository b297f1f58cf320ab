"""Half floats: 2 bytes per element; and the quantiser to shorter floating-point numbers."""

import tensorflow as tf

from models.compression.codec import Codec, CollectiveName, Context, Memory, Message, Shape
from models.compression.schemes.memory import NoMemory
from models.compression.schemes.scatter_gather import Compressor, ScatterGather
from models.compression.schemes.stripes import FlatLayout


def fp16(*, prescale: float, sum_in_float32: bool) -> Codec:
    """Round to the nearest half float, with a relative error up to 2**-11.

    Magnitudes above 65504 become infinite. Magnitudes below 6e-8 become 0, and those below 6e-5 lose digits. `prescale`
    shifts this window: it multiplies before the rounding and is divided out after it. Without `sum_in_float32`, an N-th
    of a rank's gradient is rounded: with many ranks, a prescale of about N keeps small gradients.

    Args:
        prescale: Factor before the rounding; a power of 2 loses no digits.
        sum_in_float32: Whether half floats are sent as bytes to owners, which sum them in float32, instead of an
            allreduce of half floats. This rounds twice for any number of ranks, and is faster where half floats are
            summed slowly (CPUs).

    Raises:
        ValueError: a prescale that is not positive.
    """
    if prescale <= 0:
        raise ValueError(f"prescale must be positive, got {prescale}")
    if sum_in_float32:
        return ScatterGather("fp16", RoundingQuantiser(tf.float16, prescale), NoMemory(), owner_feedback=False)
    return _SummedHalves(prescale)


class _SummedHalves(Codec):
    """mean = sum over ranks of half(g * prescale / N) / prescale.

    The division by N comes first, so that the sum is at most as large as the largest gradient of a rank.
    """

    name = "fp16"
    collectives: tuple[CollectiveName, ...] = ("allreduce",)

    def __init__(self, prescale: float) -> None:
        self.prescale = prescale

    def phase(self, number: int, value: tf.Tensor, memory: Memory, context: Context) -> tuple[Message, Memory]:
        if number == 0:
            return tf.cast(value * (self.prescale / context.size), tf.float16), memory
        return tf.cast(value, tf.float32) * (1 / self.prescale), memory


class RoundingQuantiser(Compressor):
    """Rounds to the nearest number of another floating-point type.

    Args:
        dtype: tf.float16 or tf.bfloat16.
        prescale: Multiplies before the rounding and is divided out after it.
    """

    def __init__(self, dtype: tf.DType, prescale: float) -> None:
        """Store the settings."""
        self.dtype, self.prescale = dtype, prescale
        self.layout = FlatLayout(1)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return the rounded numbers, 2 bytes per element, and the rounding errors."""
        rounded = tf.cast(parts * self.prescale, self.dtype)
        return (rounded,), parts - self._restore(rounded)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the numbers in float32."""
        return self._restore(message[0])

    def _restore(self, rounded: tf.Tensor) -> tf.Tensor:
        return tf.cast(rounded, tf.float32) * (1 / self.prescale)
