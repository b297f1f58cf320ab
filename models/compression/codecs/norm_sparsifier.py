"""The norm sparsifier: an element is sent with a probability in proportion to its magnitude."""

import tensorflow as tf

from models.compression.arithmetic.graph import fused
from models.compression.arithmetic.norms import euclidean_norm
from models.compression.arithmetic.randomness import uniform
from models.compression.arithmetic.selection import decode_signs, encode_signs, scatter_rows
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import NoMemory
from models.compression.schemes.scatter_gather import Compressor, ScatterGather


def norm_sparsifier(*, exact_mean: bool) -> Codec:
    """Send |p| * sign(p_i) with probability |p_i| / |p|, otherwise nothing: the norm and 4 bytes per sent element.

    E Q(p) = p; E|Q(p) - p|^2 = (|p|_1 / |p|_2 - 1) |p|^2. On average |p|_1 / |p|_2 elements are sent, at most sqrt(n).
    This is QSGD with one level, but as a list of the sent elements instead of two bits per element.

    The mean of N ranks is a sparse tensor too. If its owner sends it exactly, the error is that of the ranks and falls
    with their number. Otherwise the owner draws among the elements again. E|result - g|^2 / |g|^2 and payload in bytes
    for a normal gradient of 65,536 elements (262,144 bytes), the same on all N ranks (tests/benchmarks/RESULTS.md):

        exact_mean           N = 1            N = 2             N = 8
        False         3,064,   449     1,221,   659       224,  1,587
        True            205, 1,240      71.7, 2,876       8.9, 19,036

    Args:
        exact_mean: Whether owners send the exact mean, 8 bytes for each element that is not 0. Otherwise they draw
            among its elements, in fewer bytes and with 15 to 25 times the error.

    Source: Alistarh et al. 2017, section 3.1 with s = 1.
    Differs: one norm for each rank's part of a tensor; places of 31 bits instead of Elias codes.
    """
    return ScatterGather(
        "norm_sparsifier",
        NormSparsifier(),
        NoMemory(),
        owner_compressor=ExactNonzeros() if exact_mean else None,
        owner_feedback=False,
    )


class NormSparsifier(Compressor):
    """Sends the norm of each part, then the places of the drawn elements with their signs."""

    compiled = False

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 4 bytes per part and 4 per sent element."""
        norm, drawn = _draw(parts, key)
        entries = tf.where(drawn)
        places = tf.cast(entries, tf.int32)
        message = encode_signs(places[:, 0], places[:, 1], tf.gather_nd(parts, entries) > 0, norm)
        return message, parts - tf.where(drawn, tf.sign(parts) * norm, 0.0)

    def decode(self, message: tf.RaggedTensor, part_shape: Shape) -> tf.Tensor:
        """Return plus or minus the norm for each sent element, zeros elsewhere."""
        rows, places, positive, norm = decode_signs(message, 1)
        values = tf.gather(norm[:, 0], rows)
        return scatter_rows(rows, places, tf.where(positive, values, -values), message.nrows(), part_shape[0])


class ExactNonzeros(Compressor):
    """Sends the elements that are not 0, for the mean of sparse messages."""

    compiled = False

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 8 bytes per element that is not 0, its place and its value, and no remainder."""
        entries = tf.where(parts != 0)
        places, values = tf.cast(entries[:, 1], tf.int32), tf.gather_nd(parts, entries)
        words = tf.concat([tf.bitcast(places, tf.uint8), tf.bitcast(values, tf.uint8)], 1)
        lengths = 8 * tf.math.count_nonzero(parts, 1, dtype=tf.int64)
        return tf.RaggedTensor.from_row_lengths(tf.reshape(words, (-1,)), lengths, validate=False), tf.zeros_like(parts)

    def decode(self, message: tf.RaggedTensor, part_shape: Shape) -> tf.Tensor:
        """Return the sent elements, zeros elsewhere."""
        words = tf.reshape(message.flat_values, (-1, 2, 4))
        places, values = tf.bitcast(words[:, 0], tf.int32), tf.bitcast(words[:, 1], tf.float32)
        rows = tf.repeat(tf.range(tf.cast(message.nrows(), tf.int32)), tf.cast(message.row_lengths(), tf.int32) // 8)
        return scatter_rows(rows, places, values, message.nrows(), part_shape[0])


@fused
def _draw(parts: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the norm of each part and a mask of the drawn elements."""
    norm = euclidean_norm(parts)
    return norm, uniform(tuple(parts.shape), key) * norm < tf.abs(parts)
