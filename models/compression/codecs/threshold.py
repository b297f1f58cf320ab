"""Threshold quantisation: plus or minus one amount, for what has grown beyond it."""

import tensorflow as tf

from models.compression.arithmetic.graph import fused
from models.compression.arithmetic.selection import scatter_rows
from models.compression.arithmetic.sparse_signs import decode_signs, encode_signs
from models.compression.codec import Codec, Message, Shape
from models.compression.schemes.memory import ErrorFeedback
from models.compression.schemes.scatter_gather import ScatterGather
from models.compression.schemes.stripes import FlatLayout


def threshold(*, tau: float) -> Codec:
    """Send tau where the residual is tau or more, -tau where it is -tau or less: 4 bytes for each of these.

        r = r + g;  send tau * sign(r_i) where |r_i| >= tau;  r = r - what was sent

    An element moves by at most tau a step: where gradients stay above it, the residual grows without bound. Watch the
    residual's norm, and choose tau near the magnitude of large gradients.

    Args:
        tau: In units of the gradient.

    Raises:
        ValueError: a tau that is not positive.

    Source: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing".
    Differs: no entropy code; the owners' sums are quantised by the same rule, so that traffic does not grow with ranks.
    """
    if tau <= 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return ScatterGather("threshold", Beyond(tau), ErrorFeedback(), owner_feedback=True)


class Beyond:
    """The quantiser: places with their signs."""

    compiled = False
    native = None

    def __init__(self, tau: float) -> None:
        """Keep tau."""
        self.tau = tau
        self.layout = FlatLayout(1)

    def encode(self, parts: tf.Tensor, real: tf.Tensor, step: tf.Tensor, key: tf.Tensor) -> tuple[Message, tf.Tensor]:
        """4 bytes an element that is sent."""
        beyond, remainder = _cut(parts, tf.constant(self.tau))
        entries = tf.where(beyond)
        positive = tf.gather_nd(parts, entries) > 0
        places = tf.cast(entries, tf.int32)
        message = encode_signs(places[:, 0], places[:, 1], positive, tf.zeros((parts.shape[0], 0)))
        return message, remainder

    def decode(self, message: Message, part_shape: Shape) -> tf.Tensor:
        """Plus or minus tau."""
        rows, places, positive, _ = decode_signs(message, 0)
        return scatter_rows(rows, places, tf.where(positive, self.tau, -self.tau), message.nrows(), part_shape[0])


@fused
def _cut(parts: tf.Tensor, tau: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Which elements are sent, and what is left of all."""
    beyond = tf.abs(parts) >= tau
    return beyond, parts - tf.where(beyond, tf.where(parts > 0, tau, -tau), 0.0)
