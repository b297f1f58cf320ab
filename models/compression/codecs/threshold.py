"""Threshold quantisation: plus or minus one fixed amount, for every element whose residual reached it."""

import tensorflow as tf

from models.compression.arithmetic.graph import fused
from models.compression.arithmetic.selection import decode_signs, encode_signs, scatter_rows
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import ErrorFeedback
from models.compression.schemes.scatter_gather import Compressor, ScatterGather
from models.compression.schemes.stripes import FlatLayout


def threshold(*, tau: float) -> Codec:
    """Send tau for a residual of tau or more, and -tau for -tau or less: 4 bytes per sent element.

        r = r + g;  send tau * sign(r_i) where |r_i| >= tau;  r = r - what was sent

    An element moves by at most tau per step. Where gradients stay above tau, the residual grows without bound. Watch
    the residual's norm, and choose tau near the magnitude of large gradients.

    Args:
        tau: Positive, in units of the gradient.

    Raises:
        ValueError: a tau that is not positive.

    Source: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing".
    Differs: no entropy code; owners quantise their sums by the same rule, so that the traffic does not grow with the
    number of ranks.
    """
    if tau <= 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return ScatterGather("threshold", ThresholdQuantiser(tau), ErrorFeedback(), owner_feedback=True)


class ThresholdQuantiser(Compressor):
    """Sends places with their signs."""

    compiled = False

    def __init__(self, tau: float) -> None:
        """Store the threshold."""
        self.tau = tau
        self.layout = FlatLayout(1)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """Return 4 bytes per sent element."""
        reached, remainder = _subtract_sent(parts, tf.constant(self.tau))
        entries = tf.where(reached)
        positive = tf.gather_nd(parts, entries) > 0
        places = tf.cast(entries, tf.int32)
        return encode_signs(places[:, 0], places[:, 1], positive, tf.zeros((parts.shape[0], 0))), remainder

    def decode(self, message: tf.RaggedTensor, part_shape: Shape) -> tf.Tensor:
        """Return plus or minus tau for each sent element, zeros elsewhere."""
        rows, places, positive, _ = decode_signs(message, 0)
        return scatter_rows(rows, places, tf.where(positive, self.tau, -self.tau), message.nrows(), part_shape[0])


@fused
def _subtract_sent(parts: tf.Tensor, tau: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a mask of the sent elements, and the remainder of all elements."""
    reached = tf.abs(parts) >= tau
    return reached, parts - tf.where(reached, tf.where(parts > 0, tau, -tau), 0.0)
