"""The norm sparsifier: an element survives with a probability in proportion to its magnitude."""

import tensorflow as tf

from models.compression.arithmetic.graph import fused
from models.compression.arithmetic.randomness import uniform
from models.compression.arithmetic.selection import scatter_rows
from models.compression.arithmetic.sparse_signs import decode_signs, encode_signs
from models.compression.codec import Codec, Message, Shape
from models.compression.codecs.qsgd import euclidean_norm
from models.compression.schemes.memory import NoMemory
from models.compression.schemes.scatter_gather import ScatterGather
from models.compression.schemes.stripes import FlatLayout


def norm_sparsifier() -> Codec:
    """Send |p| * sign(p_i) with probability |p_i| / |p|, otherwise nothing: the norm, and 4 bytes for each survivor.

    E Q(p) = p; E|Q(p) - p|^2 = (|p|_1 / |p|_2 - 1) |p|^2; |p|_1 / |p|_2 elements survive on average, at most sqrt(n).
    This is QSGD with one level, but a list of survivors instead of two bits an element.

    Source: Alistarh et al. 2017, section 3.1 with s = 1.
    Differs: one norm for each rank's part of a tensor; places of 31 bits instead of Elias codes.
    """
    return ScatterGather("norm_sparsifier", Survivors(), NoMemory(), owner_feedback=False)


class Survivors:
    """The quantiser: the norm, then places with their signs."""

    compiled = False
    native = None

    def __init__(self) -> None:
        """Cut tensors anywhere."""
        self.layout = FlatLayout(8)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """4 bytes a survivor."""
        norm, survives = _draw(parts, key)
        entries = tf.where(survives)
        places = tf.cast(entries, tf.int32)
        message = encode_signs(places[:, 0], places[:, 1], tf.gather_nd(parts, entries) > 0, norm)
        return message, parts - tf.where(survives, tf.sign(parts) * norm, 0.0)

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Plus or minus the norm."""
        rows, places, positive, norm = decode_signs(message, 1)
        values = tf.gather(norm[:, 0], rows)
        return scatter_rows(rows, places, tf.where(positive, values, -values), message.nrows(), part_shape[0])


@fused
def _draw(parts: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The norm of each part, and which elements survive."""
    norm = euclidean_norm(parts)
    return norm, uniform(tuple(parts.shape), key) * norm < tf.abs(parts)
