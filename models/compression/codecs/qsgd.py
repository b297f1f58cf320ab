"""QSGD: stochastic rounding to a few levels, without bias."""

from typing import Literal

import tensorflow as tf

from models.compression.arithmetic.bits import pack, unpack
from models.compression.arithmetic.norms import euclidean_norm, largest_magnitude
from models.compression.arithmetic.randomness import uniform
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import ErrorFeedback, NoMemory
from models.compression.schemes.scatter_gather import Compressor, ScatterGather
from models.compression.schemes.stripes import FlatLayout


def qsgd(
    *,
    bits: int,
    bucket_size: int,
    norm: Literal["l2", "max"],
    owner_bits: int | None,
    error_feedback: bool,
) -> Codec:
    """Round to levels -s .. s of a norm, s = 2**(bits - 1) - 1, packed to `bits` bits per element.

        a = |p_i| / norm(bucket) * s;  level = floor(a), or one more with probability a - floor(a)
        Q(p)_i = norm / s * sign(p_i) * level

    E Q(p) = p. With the Euclidean norm of n elements, E|Q(p) - p|^2 <= min(n / s^2, sqrt(n) / s) |p|^2. Every rank,
    tensor and step draws its own random numbers, so that the error of the ranks' roundings falls with the number of
    ranks. The owner of each part rounds the mean again, and this error does not fall, unless `owner_bits` is 32.

    E|result - g|^2 / |g|^2 for a normal gradient of 65,536 elements, the same on all N ranks. It is for 4 bits, buckets
    of 512 and their maximum norm; the payload is in bits per element (tests/benchmarks/RESULTS.md):

        owner_bits   payload     N = 1     N = 2     N = 8
        None (4)         4.1    0.0369    0.0369    0.0369
        8                6.1    0.0370    0.0185    0.0047
        32              18.0    0.0369    0.0184    0.0046

    Args:
        bits: Bits per element, 2 to 8.
        bucket_size: Number of elements that share a norm; a multiple of 8.
        norm: "l2" is the theorem's norm; "max" has a smaller error where a bucket has more than s^2 elements.
        owner_bits: Bits per element in which an owner sends the mean, 2 to 8; 32: the exact mean in float32; None: the
            same as `bits`.
        error_feedback: Whether the rounding error is added to the next gradient, which the source does not do. It only
            helps if the error is smaller than the gradient, so not with few levels of a Euclidean norm.

    Raises:
        ValueError: bits or bucket size out of range.

    Source: Alistarh et al. 2017, section 3.1 and appendix (buckets, maximum norm).
    Differs: fixed-width levels instead of Elias codes.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be 2 to 8, got {bits}")
    if bucket_size < 8 or bucket_size % 8:
        raise ValueError(f"bucket_size must be a positive multiple of 8, got {bucket_size}")
    if owner_bits is not None and not 2 <= owner_bits <= 8 and owner_bits != 32:
        raise ValueError(f"owner_bits must be 2 to 8, 32 or None, got {owner_bits}")
    owner = ExactFloats() if owner_bits == 32 else StochasticQuantiser(owner_bits or bits, bucket_size, norm)
    return ScatterGather(
        "qsgd",
        StochasticQuantiser(bits, bucket_size, norm),
        ErrorFeedback() if error_feedback else NoMemory(),
        owner_compressor=owner,
        owner_feedback=error_feedback and owner_bits != 32,
    )


class StochasticQuantiser(Compressor):
    """Sends packed levels, then the norm of each bucket."""

    def __init__(self, bits: int, bucket_size: int, norm: Literal["l2", "max"]) -> None:
        """Store the settings; see `qsgd`."""
        self.bits = bits
        self.levels = 2 ** (bits - 1) - 1
        self.bucket_size, self.norm = bucket_size, norm
        self.layout = FlatLayout(bucket_size)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return bits / 8 bytes per element and 4 bytes per bucket."""
        count, elements = parts.shape
        bucket = self.bucket_size if elements % self.bucket_size == 0 else elements
        buckets = tf.reshape(parts, (count, elements // bucket, bucket))
        norm = largest_magnitude(buckets) if self.norm == "max" else euclidean_norm(buckets)
        # The division comes before the scaling: s / norm would exceed float32's range for a tiny norm.
        levels = tf.floor(
            tf.math.divide_no_nan(tf.abs(buckets), norm) * float(self.levels) + uniform(tuple(buckets.shape), key)
        )
        # Rounding errors may give |p| / norm slightly above 1 where one element is the whole norm.
        levels = tf.minimum(levels, float(self.levels)) * tf.where(buckets < 0, -1.0, 1.0)
        codes = tf.cast(tf.cast(levels + float(self.levels), tf.int32), tf.uint8)
        # Levels are packed within each bucket: with runs across buckets XLA would use no vector instructions.
        return (pack(codes, self.bits, 2), norm), parts - tf.reshape(levels * (norm / self.levels), (count, elements))

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the levels times the norms."""
        packed, norm = message
        levels = tf.cast(tf.cast(unpack(packed, self.bits, 2), tf.int32) - self.levels, tf.float32)
        return tf.reshape(levels * (norm / self.levels), (-1, *part_shape))


class ExactFloats(Compressor):
    """Sends every element in float32."""

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 4 bytes per element, and no remainder."""
        return (parts,), tf.zeros_like(parts)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Return the elements."""
        return message[0]
